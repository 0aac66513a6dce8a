"""The view of a run in progress: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

SAMPLES = 8  # answers shown in a run
EACH_RANK = 4  # with more ranks than this, minimum and maximum are shown
# Values shown besides the loss.
TOLD = {"reward": "reward", "teacher_kl": "teacher KL", "rewards/margins": "margin", "accuracy": "accuracy"}
TOLD |= {"macro_f1": "F1", "mae": "mean error", "pearson": "correlation"}
TOLD |= {"exact_match": "exact match", "rouge_l": "ROUGE-L"}


class Share:
    """The progress of a long task, on stderr: a bar on a terminal, elsewhere an occasional line. Tasks of less than
    `quiet` seconds are not reported.

    Args:
        name: the task, in a word or two, unless a call overrides it.
        shown: whether to report: only one rank does.
    """

    def __init__(self, name: str, shown: bool = True, quiet: float = 10.0) -> None:
        self.name, self.shown, self.quiet = name, shown, quiet
        self.now = name
        self.bar: Any = None
        self.first = self.done = 0  # the amount done at the first call, and now
        self.started = self.last = 0.0

    def __call__(self, done: int, total: int, name: str = "") -> None:
        """`done` of `total` are finished. Fewer than before means that a new task starts."""
        if not self.shown:
            return
        self.now = name or self.name
        if sys.stderr.isatty():
            self.measured(done, total)
            self._draw(done, total)
        elif text := self.line(done, total):
            print(text, file=sys.stderr, flush=True)

    def measured(self, done: int, total: int) -> str:
        """The progress as text; empty at the start and at the end."""
        now = time.perf_counter()
        if done < self.done or not self.done:
            self.first, self.started, self.last = done, now, now
        self.done = done
        if not self.first < done < total:
            return ""
        left = clock((now - self.started) / (done - self.first) * (total - done))
        return f"{self.now}: {100 * done / total:.0f} %  {left} left"

    def line(self, done: int, total: int) -> str:
        """The progress as text if a line is due: rarely, for tasks that take hours."""
        text, now = self.measured(done, total), time.perf_counter()
        if not text or now - self.last < max(self.quiet, (now - self.started) / 10):
            return ""
        self.last = now
        return text

    def _draw(self, done: int, total: int) -> None:
        if self.bar is None and done < total and time.perf_counter() - self.started > self.quiet / 10:
            from rich.console import Console
            from rich.progress import Progress

            self.bar = Progress(console=Console(stderr=True), transient=True)
            self.bar.add_task(self.name)
            self.bar.start()
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], description=self.now, completed=done, total=total)
        if done == total:
            self._clear()

    def _clear(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()


class Silent:
    """The view of every rank but the first."""

    def begin(self, steps: int, done: int = 0) -> None:
        pass

    def logged(self, record: dict[str, Any]) -> None:
        pass

    def generated(self, record: dict[str, Any]) -> None:
        pass

    def evaluated(self, done: int, total: int) -> None:
        pass

    def end(self) -> None:
        pass


class Lines(Silent):
    """A line per logged step, thinned out to about `most` of them."""

    def __init__(self, most: int = 40) -> None:
        self.most, self.steps, self.done, self.started, self.shown = most, 0, 0, time.perf_counter(), 0
        self.sampled = 0
        self.evaluation = Share("evaluation")

    def begin(self, steps: int, done: int = 0) -> None:
        self.steps, self.done, self.started = steps, done, time.perf_counter()

    def logged(self, record: dict[str, Any]) -> None:
        step = record["step"]
        due = not self.shown or step == self.steps or step - self.shown >= self.steps / self.most
        if "eval_loss" not in record and not due:
            return
        self.shown = step
        a_step = (time.perf_counter() - self.started) / max(step - self.done, 1)
        left = f"  {clock(a_step * (self.steps - step))} left" if step > self.done else ""  # otherwise unknown
        held = "".join(f"  {text}" for text in resources(record))
        print(f"step {step}/{self.steps}  {describe(record)}{held}{left}", flush=True)

    def generated(self, record: dict[str, Any]) -> None:
        if not self.sampled or record["step"] - self.sampled >= self.steps / SAMPLES:
            self.sampled = record["step"]
            print(sample(record), flush=True)

    def evaluated(self, done: int, total: int) -> None:
        if text := self.evaluation.line(done, total):
            print(text, flush=True)


class Bar(Silent):
    """A progress bar, and under it the numbers of the last step; evaluations leave a line above it."""

    def __init__(self) -> None:
        self.live: Any = None
        self.steps = self.sampled = 0
        self.evaluation = Share("evaluation")

    def begin(self, steps: int, done: int = 0) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.text import Text

        columns = (
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self.steps = steps
        self.progress, self.state = Progress(*columns, expand=True), Text("first step ...")
        self.task = self.progress.add_task("train", total=steps, completed=done)
        self.live = Live(Group(self.progress, self.state), refresh_per_second=4)
        self.live.start()

    def logged(self, record: dict[str, Any]) -> None:
        if "eval_loss" in record:
            self.live.console.print(f"step {record['step']}  {describe(record)}", highlight=False, markup=False)
        else:
            self.progress.update(self.task, completed=record["step"])
            self.state.plain = "\n".join([describe(record), "  ".join(resources(record))]).rstrip()

    def generated(self, record: dict[str, Any]) -> None:
        if not self.sampled or record["step"] - self.sampled >= self.steps / SAMPLES:
            self.sampled = record["step"]
            self.live.console.print(sample(record), highlight=False, markup=False)

    def evaluated(self, done: int, total: int) -> None:
        told = self.state.plain.partition("\nevaluation: ")[0]
        text = self.evaluation.measured(done, total)
        self.state.plain = f"{told}\n{text}" if text else told

    def end(self) -> None:
        if self.live is not None:
            self.live.stop()


def view() -> Silent:
    return Bar() if sys.stdout.isatty() else Lines()


def restore() -> None:
    """Show the cursor again after a process was killed while its bar had hidden it."""
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)


def describe(record: dict[str, Any]) -> str:
    """The numbers of a record as a short text."""
    prefix = "eval_" if "eval_loss" in record else ""
    known = {name: record.get(prefix + name) for name in TOLD}
    told = "".join(f"  {TOLD[name]} {value:.4f}" for name, value in known.items() if isinstance(value, float))
    if prefix:
        files = [name for name in record if name.startswith("eval_") and name.endswith("_loss")]
        told += "".join(f"  {name[5:-5]} {record[name]:.5f}" for name in files if name != "eval_loss")
        return f"evaluation loss {record['eval_loss']:.5f}{told}"
    norm = record.get("grad_norm")
    norm_told = f"  gradient norm {norm:.3g}" if isinstance(norm, (int, float)) else ""
    return f"loss {record['loss']:z.5f}{told}{norm_told}  {record['tokens_per_second']:,.0f} tokens/s"


def resources(record: dict[str, Any]) -> list[str]:
    """The memory of the ranks after the last step, and the maximum that one of them gathered, reduced and sent since
    the last record, as short texts; empty if not recorded."""
    ranks = record.get("ranks")
    if not ranks:
        return []
    held = [size(value) for value in ranks["held"]]
    few = len(held) <= EACH_RANK and "of" not in ranks
    told = ["memory " + (" + ".join(held) if few else f"{size(min(ranks['held']))} to {size(max(ranks['held']))}")]
    moved = {"gathered": "gathered", "reduced": "reduced", "away": "to other machines", "attention": "in attention"}
    told += [f"{name} {size(max(ranks[key]))}" for key, name in moved.items() if max(ranks.get(key, [0]))]
    waited = max(ranks["waited"][i] + ranks["met"][i] for i in range(len(held)))
    return [*told, f"waited {100 * waited / max(*ranks['seconds'], 1e-9):.0f} %"] if len(told) > 1 else told


def size(value: float) -> str:
    """Bytes as a short text."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def sample(record: dict[str, Any]) -> str:
    """A generated answer and its reward."""
    rewards = "  ".join(f"{name} {value:.2f}" for name, value in record["rewards"].items() if value is not None)
    asked, answered = record["prompt"], record["completion"]
    asked = asked if isinstance(asked, str) else said(asked[-1].get("content"))
    answered = answered if isinstance(answered, str) else " ".join(filter(None, map(_turn, answered)))
    lines = {"asked": _shortened(asked), "answered": _shortened(answered)}
    if "labels" in record:  # the row has a reference answer
        lines["right"] = _shortened(record["labels"])
    if rewards:
        lines["worth"] = rewards
    return "\n".join(f"  {name:<8}  {text}" for name, text in lines.items())


def _turn(turn: dict[str, Any]) -> str:
    """The text, call or result of a turn of an answer."""
    text = str(turn.get("content") or "")
    if turn.get("role") == "tool":
        return f"-> {text}"
    called = [call.get("function", call) for call in turn.get("tool_calls") or []]
    calls = [f"{call.get('name')}({_arguments(call.get('arguments'))})" for call in called]
    return " ".join(filter(None, [text, *calls]))


def _arguments(given: Any) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in given.items()) if isinstance(given, dict) else str(given)


def said(content: Any) -> Any:
    """The text of a turn; `<image>` stands for an image."""
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
    return "\n".join(f"  {name:8} {text}" for name, text in rows)
