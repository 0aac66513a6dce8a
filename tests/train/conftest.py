"""A small model, some rows, and a way to run several commands without importing everything each time."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DRIVER = Path(__file__).with_name("driver.py")
WORDS = "the a process shard gradient memory weight step rank model gathers holds sends adds every one".split()


@dataclass
class Run:
    """What a command left behind."""

    code: int
    output: str
    folder: Path

    @property
    def records(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def series(self, key: str) -> list[float]:
        return [record[key] for record in self.records if key in record]


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 questions with answers of very different lengths: no batch size divides them, no two steps weigh alike."""
    chance = random.Random(0)
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"

    def text(longest: int) -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(1, longest)))

    with file.open("w") as out:
        for _ in range(23):
            turns = [{"role": "user", "content": text(8)}, {"role": "assistant", "content": text(40)}]
            out.write(json.dumps({"messages": turns}) + "\n")
    return file


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> Path:
    """A model folder."""
    from shardproof.data.rows import read_rows
    from shardproof.models.tiny import build_tiny

    return build_tiny(tmp_path_factory.mktemp("tiny"), read_rows([rows]).texts())


def last_of_each(argv: Sequence[str]) -> list[str]:
    """A command in which what a test adds takes the place of what its fixtures say; commands refuse options twice."""
    first, *words = argv
    options: dict[str, list[str]] = {"": []}
    current = ""
    for word in words:
        if word.startswith("--"):
            current, has_value, _ = word.partition("=")
            options[current] = [word]
            current = "" if has_value else current
        else:
            options[current].append(word)
    return [first, *(word for option in options.values() for word in option)]


Commands = Callable[[Sequence[tuple[str, list[str]]]], dict[str, Run]]


class Drivers:
    """The processes that commands are forked from: one for each environment that tests have set, the last two kept."""

    def __init__(self) -> None:
        self._running: dict[frozenset[tuple[str, str]], subprocess.Popen[str]] = {}

    def _driver(self) -> subprocess.Popen[str]:
        key = frozenset(item for item in os.environ.items() if item[0] != "PYTEST_CURRENT_TEST")
        driver = self._running.pop(key, None)
        if driver is None:
            for other in list(self._running)[:-1]:
                self._end(self._running.pop(other))
            command = [sys.executable, "-X", "faulthandler", str(DRIVER)]
            errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
            driver = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, process_group=0
            )
            driver.stderr = errors
        self._running[key] = driver
        return driver

    def run(self, jobs: list[dict[str, Any]]) -> list[int]:
        """Exit codes. If a command hangs, the stacks of all processes are in what is raised."""
        driver = self._driver()
        try:
            driver.stdin.write(json.dumps({"folder": os.getcwd(), "jobs": jobs}) + "\n")
            driver.stdin.flush()
            there, _, _ = select.select([driver.stdout], [], [], 900)
            answer = driver.stdout.readline() if there else None
        except (BrokenPipeError, pytest.fail.Exception):  # the latter where a test may not take so long
            answer = None
        if answer:
            return json.loads(answer)
        self._running = {key: other for key, other in self._running.items() if other is not driver}
        if driver.poll() is None and answer is None:
            os.killpg(driver.pid, signal.SIGABRT)
        driver.wait(60)
        begun = [job for job in jobs if Path(job["log"]).exists()]
        said = Path(begun[-1]["log"]).read_text()[-8000:] if begun else ""
        driver.stderr.seek(0)
        pytest.fail(f"hangs or fails: {' '.join(begun[-1]['argv'] if begun else [])}\n{said}\n{driver.stderr.read()}")

    @staticmethod
    def _end(driver: subprocess.Popen[str]) -> None:
        if driver.poll() is None:
            driver.stdin.write("end\n")  # forks of this process (workers of a loader) may hold the pipe open
        driver.stdin.close()
        driver.wait(60)
        driver.stdout.close()
        driver.stderr.close()

    def close(self) -> None:
        for driver in self._running.values():
            self._end(driver)


@pytest.fixture(scope="session")
def drivers() -> Iterator[Drivers]:
    drivers = Drivers()
    yield drivers
    drivers.close()


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory, drivers: Drivers) -> Commands:
    """`commands([(name, argv), ...])`: run them; `OUT` in argv is a folder of that name, `RUNS` the one it is in."""

    def start(jobs: Sequence[tuple[str, list[str]]]) -> dict[str, Run]:
        base = tmp_path_factory.mktemp("runs")

        def placed(arg: str, name: str) -> str:
            return arg.replace("OUT", str(base / name)).replace("RUNS", str(base))

        plan = [
            {"argv": last_of_each([placed(arg, name) for arg in argv]), "log": str(base / f"{name}.log")}
            for name, argv in jobs
        ]
        codes = drivers.run(plan)
        logs = [Path(job["log"]).read_text() for job in plan]
        return {name: Run(code, log, base / name) for (name, _), code, log in zip(jobs, codes, logs, strict=True)}

    return start


@pytest.fixture(scope="session")
def sft(tiny: Path, rows: Path) -> Callable[..., list[str]]:
    """A short run of 5 steps (one epoch has 3) with a global batch of 8."""

    def argv(*more: str) -> list[str]:
        fixed = "--max-steps 5 --global-batch-size 8 --learning-rate 3e-3 --lr-scheduler constant --output-dir OUT"
        return ["sft", "--model", str(tiny), "--dataset", str(rows), *fixed.split(), *more]

    return argv
