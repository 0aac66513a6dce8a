"""Promise: `shardproof cases` runs a case, writes what it found, and its exit code says whether ours was right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardproof.casebook.runner import Runner
from shardproof.casebook.worker import Answer
from shardproof.cli.cases import run
from shardproof.errors import ConfigError

TESTS = Path(__file__).parents[1]


def cases(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardproof", "cases", *argv]
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    return subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=cwd, env=env, check=False)


@pytest.mark.slow
def test_one_case_on_ours_writes_results_and_page(tmp_path):
    done = cases(
        *"--case dummy_loss_over_unused_adapter --engines ours --stages 0,3 --json r.json --page p.md".split(),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "ours 0: 1 equal, 0 wrong" in done.stdout
    (case,) = json.loads((tmp_path / "r.json").read_text())["cases"]
    assert [(r["engine"], r["status"]) for r in case["results"]] == [("ours-0", "equal"), ("ours-3", "equal")]
    text = (tmp_path / "p.md").read_text()
    assert "ms-swift#3262 | equal | equal |" in text
    again = cases("--read", "r.json", cwd=tmp_path)
    assert again.stdout.strip() == text.strip()


@pytest.mark.slow
def test_ours_being_wrong_is_exit_code_1(tmp_path):
    done = cases(*"--case casebook.broken.differs --stages 3".split(), cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "wrong 2e-01 (value)" in done.stdout
    assert not list(tmp_path.iterdir())  # named cases leave no file unless told


@pytest.mark.slow
def test_mistakes_are_one_message_and_exit_code_2(tmp_path):
    for argv, text in [
        ("--case plain_lop", "Did you mean plain_loop?"),
        ("--engines ours,fsdp", "'fsdp' is none of"),
        ("--stages 4", "'4' is none of"),
        ("--world 1", "--world 1"),
        ("--read none.json", "is not a casebook"),
    ]:
        done = cases(*argv.split(), cwd=tmp_path)
        assert done.returncode == 2, (argv, done.stderr)
        assert text in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["--page", "--json"])
def test_a_file_that_cannot_be_written_is_told_before_the_cases_are_run(tmp_path, option):
    with pytest.raises(ConfigError, match=f"{option} .*x.md cannot be written: there is no folder"):
        run(["--case", "tied_weights", option, str(tmp_path / "no" / "x.md")])


def test_the_list_names_every_case(tmp_path):
    done = cases("--list", cwd=tmp_path)
    assert done.stdout.startswith("dummy_loss_over_unused_adapter")
    assert len(done.stdout.splitlines()) >= 40


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from shardproof.cli.main import main\n"
        "try: main(['cases', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'rich', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: shardproof cases" in done.stdout


def test_a_case_that_fails_in_one_process_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of the user's own may (--case MODULE)."""
    runner = Runner(2, 1.0)
    for answer, told in ((Answer("error", text="ValueError: x"), "ValueError: x"), (Answer("silent"), "within 180 s")):
        monkeypatch.setattr(runner, "group", lambda _, answer=answer: SimpleNamespace(ask=lambda *_: [answer]))
        with pytest.raises(ConfigError, match=f"Case mine.own does not run in one process.*{told}"):
            runner.reference("mine.own")
    runner.close()
