"""How `--help` shows an option that has many values: by name, and the values in the text, where lines are wrapped."""

from __future__ import annotations

import argparse

_LONGEST = 60  # characters of `a|b|c`


class Help(argparse.HelpFormatter):
    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return "KIND" if _values(action) else super()._format_args(action, default_metavar)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        values = _values(action)
        return f"{action.help}: {', '.join(values)}" if values else action.help


def _values(action: argparse.Action) -> list[str]:
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    return metavar.split("|") if "|" in metavar and len(metavar) > _LONGEST else []
