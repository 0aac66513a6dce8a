"""The result of a check, and how it is shown."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        area: options, environment, data, model, plan or trial.
        name: what was checked.
        evidence: what was found.
        cause: why that is a problem; empty if it is not.
        option: what to change.
    """

    area: str
    name: str
    status: Status
    evidence: str
    cause: str = ""
    option: str = ""


def some(names: Sequence[str], most: int = 3) -> str:
    """The first names, and the number of further ones."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def option_in(error: Exception, otherwise: str = "") -> str:
    """The first option that an error text names; our own errors name the option to change."""
    found = re.search(r"--[a-z][a-z0-9-]+", str(error))
    return found.group() if found else otherwise


def as_json(checks: Sequence[Check]) -> str:
    """All checks as one JSON object."""
    failed = any(check.status == "fail" for check in checks)
    return json.dumps({"ok": not failed, "checks": [dataclasses.asdict(check) for check in checks]}, indent=1)


def show(checks: Sequence[Check]) -> None:
    """Print a line for each check, and below it the cause and what to do if it is not ok."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(4):
        table.add_column(overflow="fold")
    area = ""
    for check in checks:
        table.add_row(
            Text(check.area if check.area != area else "", "bold"),
            Text(check.status, colours[check.status]),
            check.name,
            Text(check.evidence),
        )
        area = check.area
        if check.cause:
            table.add_row("", "", "", Text(check.cause, "dim"))
        if check.option:
            table.add_row("", "", "", Text(f"-> {check.option}", "bold"))
    Console().print(table)
    count = {status: sum(check.status == status for check in checks) for status in colours}
    print(f"\n{count['ok']} ok, {count['warn']} to look at, {count['fail']} that would spoil the run")
