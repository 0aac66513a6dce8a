"""Run cases on engines, each in processes of its own and within a time limit."""

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
    """What came out of a case on an engine.

    Attributes:
        setting: the remedy it ran with, None for the case as it is.
        status: equal, wrong, error, hang, n/a (cannot be written for this engine) or skipped (a package is missing).
        error: the largest relative error, of equal and wrong.
        text: where that error is, the first line of an error, where ranks hang, or the reason.
        seconds: of the slowest rank.
    """

    case: str
    engine: str
    setting: str | None
    status: str
    error: float = 0.0
    text: str = ""
    seconds: float = 0.0


class Runner:
    """Holds the processes of one kind of engine and of the reference, and replaces them when a case ends badly."""

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
        """The file with what one process gives.

        Raises:
            ConfigError: the case fails there: it is no case then.
        """
        if name not in self.references:
            path = str(Path(self.folder.name) / name)
            (answer,) = self.group("one").ask(Task(name, "one", None, self.world, path), REFERENCE_LIMIT)
            if answer.kind != "done":
                ended = {"silent": f"it has not ended within {REFERENCE_LIMIT:.0f} s"}.get(answer.kind, answer.text)
                raise ConfigError(f"Case {name} does not run in one process, which is its reference: {ended}")
            self.references[name] = path
        return self.references[name]

    def run(self, name: str, engine: str, setting: str | None) -> Result:
        """One case on one engine. What is not equal on a peer is repeated in fresh processes, and that counts:
        no peer is blamed for what an earlier case has left behind."""
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
    """One result of what all ranks said."""
    seconds = round(max(answer.seconds for answer in answers), 2)
    base = (task.case, task.engine, task.setting)
    # A rank that dies takes the connection of the others with it: their errors are its echo.
    failed = [a for a in answers if a.kind == "died"] or [a for a in answers if a.kind == "error"]
    if failed:
        return Result(*base, "error", text=failed[0].text, seconds=seconds)
    if any(answer.kind == "silent" for answer in answers):
        return Result(*base, "hang", seconds=seconds)
    worst = max(answers, key=lambda answer: answer.error)
    status = "equal" if worst.error <= tolerance else "wrong"
    return Result(*base, status, worst.error, worst.text, seconds)


def available(engines: list[str]) -> list[str]:
    """Those that are installed."""
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
    """Every case on every engine, with every setting; each result is reported as it comes."""
    results: list[Result] = []
    with runner(world, limit) as own:
        for engine in engines:
            for name in names:
                for setting in case_named(name).settings(engine):
                    results.append(own.run(name, engine, setting))
                    report(results[-1])
    return results


def failures(results: list[Result]) -> list[Result]:
    """Where ours is not equal."""
    return [r for r in results if r.engine.startswith("ours") and r.status not in ("equal", "skipped")]


def shown(error: float) -> str:
    return "not finite" if math.isinf(error) else f"{error:.0e}"
