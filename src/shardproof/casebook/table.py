"""The view of running cases: a table that fills up on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import Any

from shardproof.casebook.runner import Result

STYLES = {"equal": "green", "wrong": "red", "error": "red", "hang": "magenta"}
HEADINGS = {"ddp": "DDP", "fsdp2": "FSDP2"}


def heading(engine: str) -> str:
    """The usual name of an engine."""
    family, _, stage = engine.partition("-")
    return {"ours": f"ours {stage}", "deepspeed": f"ZeRO-{stage}"}.get(family) or HEADINGS[engine]


def worded(result: Result) -> str:
    """The status, with the largest relative error if results are wrong."""
    if result.status != "wrong":
        return result.status
    return "wrong" if result.error == float("inf") else f"wrong {result.error:.0e}"


def cell(results: list[Result]) -> str:
    """The result of the unchanged case, then with each documented setting."""
    return " > ".join(worded(result) for result in results)


def line(result: Result) -> str:
    """A result for a log."""
    name = heading(result.engine) + (f" with {result.setting}" if result.setting else "")
    text = f" ({result.text})" if result.text and result.status not in ("equal", "n/a") else ""
    return f"{result.case:38} {name:9} {worded(result)}{text}  {result.seconds:.1f} s"


class Lines:
    """A line per result."""

    def begin(self) -> None:
        pass

    def add(self, result: Result) -> None:
        print(line(result), flush=True)

    def end(self) -> None:
        pass


class Live:
    """A table of cases and engines that fills up while they run. It shows as many rows as fit, and all at the end."""

    def __init__(self, names: list[str], engines: list[str]) -> None:
        from rich.live import Live as RichLive

        self.names, self.engines = names, engines
        self.results: dict[tuple[str, str], list[Result]] = {}
        self.last = names[0]
        self.live = RichLive(get_renderable=self.window, refresh_per_second=4, transient=True)

    def begin(self) -> None:
        self.live.start()

    def add(self, result: Result) -> None:
        self.results.setdefault((result.case, result.engine), []).append(result)
        self.last = result.case

    def end(self) -> None:
        self.live.stop()
        self.live.console.print(self.table(self.names))

    def window(self) -> Any:
        room = max(3, self.live.console.size.height - 6)
        at = self.names.index(self.last)
        first = max(0, min(at - room // 2, len(self.names) - room))
        return self.table(self.names[first : first + room])

    def table(self, names: list[str]) -> Any:
        from rich.table import Table
        from rich.text import Text

        found = Table("case", *(heading(engine) for engine in self.engines))
        for name in names:
            row = []
            for engine in self.engines:
                results = self.results.get((name, engine), [])
                style = STYLES.get(results[-1].status, "dim") if results else "dim"
                row.append(Text(cell(results) or "", style=style))
            found.add_row(name, *row)
        return found


def view(names: list[str], engines: list[str]) -> Lines | Live:
    return Live(names, engines) if sys.stdout.isatty() else Lines()


def summary(results: list[Result]) -> list[str]:
    """A line for each engine: the results of its cases, unchanged and with the best documented setting."""
    lines = []
    for engine in dict.fromkeys(result.engine for result in results):
        own = [result for result in results if result.engine == engine]
        as_is = counted([r for r in own if r.setting is None])
        best = counted(best_of(own))
        text = as_is if as_is == best else f"{as_is}; with the best documented setting {best}"
        lines.append(f"{heading(engine)}: {text}")
    return lines


def best_of(results: list[Result]) -> list[Result]:
    """For each case, the best of its settings."""
    order = ("equal", "wrong", "error", "hang", "skipped", "n/a")
    best: dict[str, Result] = {}
    for result in results:
        known = best.get(result.case)
        if known is None or order.index(result.status) < order.index(known.status):
            best[result.case] = result
    return list(best.values())


def counted(results: list[Result]) -> str:
    numbers = {status: sum(r.status == status for r in results) for status in ("equal", "wrong", "error", "hang")}
    rest = len(results) - sum(numbers.values())
    return ", ".join(f"{n} {status}" for status, n in numbers.items()) + (f", {rest} not run" if rest else "")
