"""`shardproof completion SHELL`: a script for shell completion of commands and options.

shtab generates it from the parsers of the commands. The script is static, so completing a word does not start Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from shardproof.cli.main import COMMANDS
from shardproof.cli.options import Parser, parse
from shardproof.cli.table import parser_of
from shardproof.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")
DESCRIPTION = """Print a script for shell completion of commands, options and their values. Run once for each shell:
  bash   shardproof completion bash > ~/.local/share/bash-completion/completions/shardproof
  zsh    shardproof completion zsh > FOLDER/_shardproof, where FOLDER is in $fpath
  fish   shardproof completion fish > ~/.config/fish/completions/shardproof.fish"""
_FILES = set(
    "run_file config dataset val_dataset deepspeed external_plugins image audio video file page text output".split()
)
_FOLDERS = set(
    "model ref_model reward_model teacher_model cached_dataset cached_val_dataset output_dir resume run_dir run_dirs"
    " source folder".split()
)


def parser() -> Parser:
    """The option table of the command."""
    made = Parser(
        prog="shardproof completion",
        usage=f"shardproof completion {'|'.join(SHELLS)}",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("shell", metavar="|".join(SHELLS), help="the shell to write the script for")
    return made


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    shell = parse(parser(), argv)["shell"]
    if shell not in SHELLS:
        raise ConfigError(f"There is no script for {shell!r}, only for {', '.join(SHELLS)}.")
    print(script(shell))
    return 0


def script(shell: str) -> str:
    """The script for one of `SHELLS`."""
    import shtab

    root = Parser(prog="shardproof", description="Fine-tune language and omni models.", allow_abbrev=False)
    root.add_argument("--version", action="store_true", help="show the version")
    commands = root.add_subparsers(dest="command")
    for name, text in COMMANDS.items():
        table = parser_of(name)
        _say_what_completes(table._actions, shtab.FILE, shtab.DIRECTORY)
        if name == "data":
            data = commands.add_parser(name, help=text)
            data.add_subparsers(dest="data").add_parser("show", parents=[table], add_help=False, help=text)
        else:
            commands.add_parser(name, parents=[table], add_help=False, help=text)
    return str(shtab.complete(root, shell=shell))


def _say_what_completes(actions: Iterable[argparse.Action], file: Any, folder: Any) -> None:
    """Tell shtab how to complete the values of options: the words of `a|b|c`, files, or folders."""
    for action in actions:
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        if "|" in metavar:
            action.choices = metavar.split("|")
        elif action.dest in _FILES:
            action.complete = file  # type: ignore[attr-defined]
        elif action.dest in _FOLDERS:
            action.complete = folder  # type: ignore[attr-defined]
