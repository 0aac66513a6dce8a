"""`shardproof explain`: what an error message means, from public threads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shardproof.cli.options import Parser
from shardproof.errors import ConfigError

DESCRIPTION = """Match an error message of DeepSpeed, DDP, FSDP, NCCL, CUDA, transformers, TRL or PEFT to known
failures: what it means, its cause, the fixes used there, and what is different here. The message comes from the command
line, a file (--file) or a pipe. Exit code 1 if none matches."""

SHOWN = 3  # failures that are shown in full; a log of many ranks has echoes of the first


def parser() -> Parser:
    """The option table of the command."""
    made = Parser(
        prog="shardproof explain",
        usage="shardproof explain [TEXT | --file LOG]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("text", nargs="*", metavar="TEXT", help="the error, in quotes")
    made.add_argument("--file", metavar="LOG", help="a file that contains it")
    made.add_argument("--list", action="store_true", help="list the known failures")
    return made


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    found = parser().parse_args(list(argv))
    from shardproof.doctor.explain import explain, told
    from shardproof.doctor.known.errors import KNOWN

    if found.list:
        width = max(len(known.name) for known in KNOWN) + 2
        for known in KNOWN:
            print(f"{known.name:{width}}{known.engines}")
        return 0
    matches = explain(_text(found.text, found.file))
    if not matches:
        print(
            "No known failure matches this text. Paste all of it, with tracebacks: the key line is often the first.\n"
            "'shardproof explain --list' shows the known failures.",
            file=sys.stderr,
        )
        return 1
    print("\n\n".join(told(match) for match in matches[:SHOWN]))
    if matches[SHOWN:]:
        print("\nalso matched: " + ", ".join(match.known.name for match in matches[SHOWN:]))
    return 0


def _text(words: Sequence[str], file: str | None) -> str:
    if file and words:
        raise ConfigError(f"--file {file} and TEXT cannot be used together. Give one of them.")
    if file:
        try:
            return Path(file).expanduser().read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(f"--file {file} cannot be read: {error.strerror}.") from error
    text = " ".join(words).encode("utf-8", "surrogateescape")  # bytes that are not UTF-8 arrive as surrogates
    if not text and not sys.stdin.isatty():
        text = sys.stdin.buffer.read()
    if not text.strip():
        raise ConfigError(
            "No text was given. Paste it in quotes, pipe it, or name a file: shardproof explain --file LOG"
        )
    return text.decode("utf-8", "replace")
