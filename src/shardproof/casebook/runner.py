"""Run cases on engines, in separate processes with a time limit."""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardproof.casebook.case import Case, case_named
from shardproof.casebook.worker import Answer, Group, Task
from shardproof.errors import ConfigError

REFERENCE_LIMIT = 180.0


@dataclass(frozen=True)
class Result:
    """The result of a case on an engine.

    Attributes:
        setting: the remedy it ran with, or None.
        status: equal, wrong, error, hang, n/a (cannot be written for this engine) or skipped (a package is missing).
        error: the largest relative error, for equal and wrong.
        text: the place of that error, the first line of an exception, the place where ranks hang, or the reason.
        seconds: the time of the slowest rank.
    """

    case: str
    engine: str
    setting: str | None
    status: str
    error: float = 0.0
    text: str = ""
    seconds: float = 0.0


class Runner:
    """Holds the processes of one kind of engine and of the reference, and replaces them after a failed case."""

    def __init__(self, world: int, limit: float) -> None:
        self.world, self.limit = world, limit
        self.groups: dict[str, Group] = {}  # by kind of engine
        self.references: dict[str, str] = {}
        self.folder = tempfile.TemporaryDirectory(prefix="shardproof-references-")

    def close(self) -> None:
        self.keep_only()
        self.folder.cleanup()

    def keep_only(self, *families: str) -> None:
        for family in [f for f in self.groups if f not in families]:
            self.groups.pop(family).close()

    def group(self, family: str) -> Group:
        if family not in self.groups:
            self.keep_only("one")
            self.groups[family] = Group(1 if family == "one" else self.world, family)
        return self.groups[family]

    def reference(self, name: str) -> str:
        """The file with the results of one process.

        Raises:
            ConfigError: the case fails there, so it is not a valid case.
        """
        if name not in self.references:
            path = str(Path(self.folder.name) / name)
            (answer,) = self.group("one").ask(Task(name, "one", None, self.world, path), REFERENCE_LIMIT)
            if answer.kind != "done":
                ended = {"silent": f"it did not end within {REFERENCE_LIMIT:.0f} s"}.get(answer.kind, answer.text)
                raise ConfigError(f"Case {name} does not run in one process, which is the reference: {ended}")
            self.references[name] = path
        return self.references[name]

    def run(self, name: str, engine: str, setting: str | None) -> Result:
        """Run one case on one engine. A peer's result that is not equal is repeated in fresh processes, and the
        repetition counts: no peer is blamed for the effects of an earlier case."""
        case = case_named(name)
        reason = case.not_for.get(engine) or case.not_for.get(engine.partition("-")[0])
        if reason:
            return Result(name, engine, setting, "n/a", text=reason)
        missing = case.missing()
        if missing:
            return Result(name, engine, setting, "skipped", text=f"needs {', '.join(missing)}")
        task = Task(name, engine, setting, self.world, self.reference(name))
        family = engine.partition("-")[0]
        again = self.group(family).used and family != "ours"
        result = self._once(task, case)
        if not again or result.status == "equal":
            return result
        self.keep_only("one")
        return self._once(task, case)

    def _once(self, task: Task, case: Case) -> Result:
        group = self.group(task.engine.partition("-")[0])
        answers = group.ask(task, self.limit)
        result = judge(task, answers, case.tolerance)
        if result.status == "hang":
            places = [group.standing(r) if a.kind == "silent" else f"rank {r} is done" for r, a in enumerate(answers)]
            text = "; ".join(places)
            result = Result(task.case, task.engine, task.setting, "hang", text=text, seconds=self.limit)
        if result.status not in ("equal", "wrong"):
            self.keep_only("one")
        return result


def judge(task: Task, answers: list[Answer], tolerance: float) -> Result:
    """One result from the answers of all ranks."""
    seconds = round(max(answer.seconds for answer in answers), 2)
    base = (task.case, task.engine, task.setting)
    # A rank that dies breaks the connections of the others: their errors are only echoes.
    failed = [a for a in answers if a.kind == "died"] or [a for a in answers if a.kind == "error"]
    if failed:
        return Result(*base, "error", text=failed[0].text, seconds=seconds)
    if any(answer.kind == "silent" for answer in answers):
        return Result(*base, "hang", seconds=seconds)
    worst = max(answers, key=lambda answer: answer.error)
    status = "equal" if worst.error <= tolerance else "wrong"
    return Result(*base, status, worst.error, worst.text, seconds)


def available(engines: list[str]) -> list[str]:
    """The engines that are installed."""
    there = importlib.util.find_spec("deepspeed") is not None
    return [name for name in engines if there or not name.startswith("deepspeed")]


@contextmanager
def runner(world: int, limit: float) -> Iterator[Runner]:
    found = Runner(world, limit)
    try:
        yield found
    finally:
        found.close()


def run_all(
    names: list[str], engines: list[str], world: int, limit: float, report: Callable[[Result], None]
) -> list[Result]:
    """Run every case on every engine, with every setting; each result is reported at once."""
    results: list[Result] = []
    with runner(world, limit) as own:
        for engine in engines:
            for name in names:
                for setting in case_named(name).settings(engine):
                    results.append(own.run(name, engine, setting))
                    report(results[-1])
    return results


def failures(results: list[Result]) -> list[Result]:
    """The results of our engine that are not equal."""
    return [r for r in results if r.engine.startswith("ours") and r.status not in ("equal", "skipped")]


def shown(error: float) -> str:
    return "not finite" if math.isinf(error) else f"{error:.0e}"
