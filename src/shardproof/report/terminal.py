"""What a run looks like while it runs: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

SAMPLES = 8  # answers shown in a run
TOLD = {"reward": "reward", "rewards/margins": "margin", "accuracy": "accuracy"}  # beside the loss


class Silent:
    """The view of every rank but the first."""

    def begin(self, steps: int) -> None:
        pass

    def logged(self, record: dict[str, Any]) -> None:
        pass

    def generated(self, record: dict[str, Any]) -> None:
        pass

    def end(self) -> None:
        pass


class Lines(Silent):
    """A line per logged step, thinned out to about `most` of them."""

    def __init__(self, most: int = 40) -> None:
        self.most, self.steps, self.started, self.shown = most, 0, time.perf_counter(), 0
        self.sampled = 0

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

    def generated(self, record: dict[str, Any]) -> None:
        if not self.sampled or record["step"] - self.sampled >= self.steps / SAMPLES:
            self.sampled = record["step"]
            print(sample(record), flush=True)


class Bar(Silent):
    """A progress bar with loss and speed; evaluations leave a line above it."""

    def __init__(self) -> None:
        self.progress: Any = None
        self.steps = self.sampled = 0

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
        self.steps = steps
        self.progress = Progress(*columns, expand=True)
        self.task = self.progress.add_task("train", total=steps, state="first step ...")
        self.progress.start()

    def logged(self, record: dict[str, Any]) -> None:
        if "eval_loss" in record:
            self.progress.console.print(f"step {record['step']}  {describe(record)}", highlight=False)
        else:
            self.progress.update(self.task, completed=record["step"], state=describe(record))

    def generated(self, record: dict[str, Any]) -> None:
        if not self.sampled or record["step"] - self.sampled >= self.steps / SAMPLES:
            self.sampled = record["step"]
            self.progress.console.print(sample(record), highlight=False, markup=False)

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
    prefix = "eval_" if "eval_loss" in record else ""
    known = {name: record.get(prefix + name) for name in TOLD}
    told = "".join(f"  {TOLD[name]} {value:.4f}" for name, value in known.items() if isinstance(value, float))
    if prefix:
        return f"evaluation loss {record['eval_loss']:.5f}{told}"
    return f"loss {record['loss']:.5f}{told}  {record['tokens_per_second']:,.0f} tokens/s"


def sample(record: dict[str, Any]) -> str:
    """One answer that was generated, and what it was worth."""
    rewards = "  ".join(f"{name} {value:.2f}" for name, value in record["rewards"].items() if value is not None)
    asked, answered = record["prompt"], record["completion"]
    asked = asked if isinstance(asked, str) else _said(asked[-1].get("content"))
    answered = answered if isinstance(answered, str) else "".join(str(turn.get("content") or "") for turn in answered)
    return f"  asked     {_shortened(asked)}\n  answered  {_shortened(answered)}\n  worth     {rewards}"


def _said(content: Any) -> Any:
    """The text of a turn; `<image>` stands for a picture."""
    if not isinstance(content, list):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)


def _shortened(text: Any, most: int = 160) -> str:
    words = " ".join(str(text).split())
    return words if len(words) <= most else words[: most - 4] + " ..."


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def table(rows: list[tuple[str, str]]) -> str:
    """Two columns of text, names first."""
    return "\n".join(f"  {name:9}{text}" for name, text in rows)
