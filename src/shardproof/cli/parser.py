"""The parser of every command: its errors and the layout of its help."""

from __future__ import annotations

import argparse
from typing import NoReturn

from shardproof.errors import ConfigError

_LONGEST = 60  # characters of `a|b|c`


class Parser(argparse.ArgumentParser):
    """An argument parser that raises our errors: one message, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}\n'{self.prog} --help' lists the options.")


class Help(argparse.HelpFormatter):
    """Lists the values of an option that has many of them in its help text, which is wrapped."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return "KIND" if _values(action) else super()._format_args(action, default_metavar)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        values = _values(action)
        return f"{action.help}: {', '.join(values)}" if values else action.help


def _values(action: argparse.Action) -> list[str]:
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    return metavar.split("|") if "|" in metavar and len(metavar) > _LONGEST else []
