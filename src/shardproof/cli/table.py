"""The option table of every command, for code that only reads it: shell completion, the pages of the site, tests."""

from __future__ import annotations

import importlib

from shardproof.cli.options import Parser


def parser_of(command: str) -> Parser:
    """A new instance of the parser of `command`."""
    made: Parser = importlib.import_module(f"shardproof.cli.{command}").parser()
    return made
