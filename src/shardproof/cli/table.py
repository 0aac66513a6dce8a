"""The option table of every command, for those that only read it: shell completion, the pages of the site, tests."""

from __future__ import annotations

import importlib

from shardproof.cli.options import Parser


def parser_of(command: str) -> Parser:
    """The parser that `command` reads its words with; a new one each time."""
    made: Parser = importlib.import_module(f"shardproof.cli.{command}").parser()
    return made
