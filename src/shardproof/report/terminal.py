"""What a run looks like while it runs: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any


class Silent:
    """The view of every rank but the first."""

    def begin(self, steps: int) -> None:
        pass

    def logged(self, record: dict[str, Any]) -> None:
        pass

    def end(self) -> None:
        pass


class Lines(Silent):
    """A line per logged step, thinned out to about `most` of them."""

    def __init__(self, most: int = 40) -> None:
        self.most, self.steps, self.started, self.shown = most, 0, time.perf_counter(), 0

    def begin(self, steps: int) -> None:
        self.steps, self.started = steps, time.perf_counter()

    def logged(self, record: dict[str, Any]) -> None:
        step = record["step"]
        due = not self.shown or step == self.steps or step - self.shown >= self.steps / self.most
        if "eval_loss" not in record and not due:
            return
        self.shown = step
        left = (time.perf_counter() - self.started) / max(step, 1) * (self.steps - step)
        print(f"step {step}/{self.steps}  {describe(record)}  {clock(left)} left", flush=True)


class Bar(Silent):
    """A progress bar with loss and speed; evaluations leave a line above it."""

    def __init__(self) -> None:
        self.progress: Any = None

    def begin(self, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self.progress = Progress(*columns, expand=True)
        self.task = self.progress.add_task("train", total=steps, state="first step ...")
        self.progress.start()

    def logged(self, record: dict[str, Any]) -> None:
        if "eval_loss" in record:
            self.progress.console.print(f"step {record['step']}  {describe(record)}", highlight=False)
        else:
            self.progress.update(self.task, completed=record["step"], state=describe(record))

    def end(self) -> None:
        if self.progress is not None:
            self.progress.stop()


def view() -> Silent:
    return Bar() if sys.stdout.isatty() else Lines()


def restore() -> None:
    """Show the cursor again, which the bar of a process that was killed has hidden."""
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)


def describe(record: dict[str, Any]) -> str:
    """The numbers of a record in a few words."""
    if "eval_loss" in record:
        return f"evaluation loss {record['eval_loss']:.5f}"
    return f"loss {record['loss']:.5f}  {record['tokens_per_second']:,.0f} tokens/s"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def table(rows: list[tuple[str, str]]) -> str:
    """Two columns of text, names first."""
    return "\n".join(f"  {name:9}{text}" for name, text in rows)
