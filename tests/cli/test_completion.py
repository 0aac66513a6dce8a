"""`shardproof completion`: the script is tried in a real bash, and in zsh and fish where they are installed."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from shardproof.cli.completion import SHELLS, run, script
from shardproof.cli.main import COMMANDS
from shardproof.cli.table import parser_of
from shardproof.errors import ConfigError

# What bash does at the Tab key: the function that `complete` registered, with the words so far.
PRESS_TAB = """
source "$1"; shift
registered=$(complete -p shardproof); function=${registered##*-F }; function=${function%% *}
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; COMP_TYPE=9
"$function" shardproof "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}" 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def bash(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "shardproof.bash"
    file.write_text(script("bash"))
    return file


def completed(bash: Path, line: str, cwd: Path | None = None) -> set[str]:
    words = shlex.split(line) + ([""] if line.endswith(" ") else [])
    command = ["bash", "--norc", "-c", PRESS_TAB, "bash", str(bash), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, cwd=cwd)
    return set(done.stdout.split())


def test_bash_completes_commands(bash) -> None:
    assert set(COMMANDS) <= completed(bash, "shardproof ")
    assert completed(bash, "shardproof ex") == {"explain", "export"}


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "data"])
def test_bash_completes_every_option_of_a_command(bash, command) -> None:
    options = {o for action in parser_of(command)._actions for o in action.option_strings if o.startswith("--")}
    assert completed(bash, f"shardproof {command} --") == options


@pytest.mark.parametrize(
    "line, words",
    [
        ("shardproof sft --max-le", {"--max-length"}),
        ("shardproof sft --tuner ", {"full", "lora"}),
        ("shardproof sft --model tiny --packing ", {"yes", "no"}),
        ("shardproof rlhf --rlhf-type gr", {"grpo"}),
        ("shardproof data sh", {"show"}),
        ("shardproof data show --chat", {"--chat-template"}),
        ("shardproof completion f", {"fish"}),
    ],
)
def test_bash_completes_options_and_their_values(bash, line, words) -> None:
    found = completed(bash, line)
    assert words <= found
    if not line.endswith(" "):
        assert found == words


def test_bash_completes_files(bash, tmp_path) -> None:
    (tmp_path / "train.jsonl").touch()
    assert "train.jsonl" in completed(bash, "shardproof sft --dataset tra", tmp_path)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_reads_its_script() -> None:
    subprocess.run(["zsh", "-n"], input=script("zsh"), text=True, check=True, timeout=30)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(tmp_path) -> None:
    file = tmp_path / "shardproof.fish"
    file.write_text(script("fish"))
    for line, word in (("shardproof ex", "export"), ("shardproof sft --max-le", "--max-length")):
        command = f"source {file}; complete -C {shlex.quote(line)}"
        done = subprocess.run(["fish", "--no-config", "-c", command], capture_output=True, text=True, timeout=30)
        assert word in [row.split("\t")[0] for row in done.stdout.splitlines()]


def test_there_is_a_script_for_each_shell(capsys) -> None:
    for shell in SHELLS:
        assert run([shell]) == 0
        assert "max-length" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="There is no script for 'ksh'"):
        run(["ksh"])
