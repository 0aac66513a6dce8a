"""The processes that run cases: ranks of one gloo group, which run task after task until one fails.

They are forked from a server that has imported everything, so that replacing them is cheap, and imports do not count
towards the time of a case.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import sysconfig
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_LIMIT = 600.0  # seconds: DeepSpeed may compile its communication when it is used for the first time
PATIENCE, LOOK = 4, 3.0  # PATIENCE: times the limit, for a rank that computes; LOOK: seconds between checks
GRACE = 3.0  # seconds for other ranks to fail by themselves after one has
# Code that a script calls into, which is skipped when reporting where it hangs.
HERE = Path(__file__).parent
PATHS = sysconfig.get_paths()
LIBRARIES = (
    "<",
    PATHS["stdlib"],
    PATHS["purelib"],
    *(str(path) for path in (HERE / "run.py", HERE / "engines.py", HERE.parent / "zero")),
)


@dataclass(frozen=True)
class Task:
    """A case on an engine. `expected` is the file of the reference, which the engine `one` writes."""

    case: str
    engine: str
    setting: str | None
    world: int
    expected: str


def perform(task: Task, folder: Path) -> tuple[float, str]:
    """Run a task on this rank. Returns the largest relative error and its place."""
    import torch
    import torch.distributed as dist

    from shardproof.casebook.case import case_named
    from shardproof.casebook.engines import make_engine
    from shardproof.casebook.run import Run
    from shardproof.casebook.verdict import compare

    case = case_named(task.case)
    options = case.options(task.setting)
    engine = make_engine(task.engine, case, options)
    shared = folder / f"{task.case}-{task.engine}"
    shared.mkdir(exist_ok=True)
    found = Run(case, engine, task.world, shared, options).play()
    if task.engine == "one":
        torch.save(found, task.expected)
        return 0.0, ""
    difference = compare(found, torch.load(task.expected, weights_only=False), engine.rank)
    dist.barrier()  # a rank that posted one collective too many is caught in its own case, not in the next
    return difference.error, difference.where


def warm_up(family: str) -> None:
    """Do an engine's one-time work in a process, so that it does not count towards the time of its first case."""
    warnings.simplefilter("ignore")
    if family == "deepspeed":
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")


def rank_main(rank: int, world: int, family: str, folder: str, pipe: Any) -> None:
    """A rank: join the group, then take tasks from the pipe until it closes."""
    os.setpgid(0, 0)  # its children can be killed with it; Ctrl-C goes to the parent
    stacks = open(f"{folder}/rank{rank}.stacks", "w")  # noqa: SIM115 - lives as long as the process
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    out = os.open(f"{folder}/rank{rank}.out", os.O_CREAT | os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
        dist.barrier()
    warm_up(family)
    pipe.send(("ready", 0.0, "", 0.0))
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            os._exit(0)  # the parent has closed the group: exit without cleanup
        gc.collect()
        started = time.perf_counter()
        try:
            error, where = perform(task, Path(folder))
            pipe.send(("done", error, where, time.perf_counter() - started))
        except BaseException as failure:  # whatever ends a case is its result
            traceback.print_exc()
            sys.stderr.flush()
            pipe.send(("error", 0.0, first_line(failure), time.perf_counter() - started))


def processor_seconds(pid: int) -> float:
    """The CPU time of a process so far; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def first_line(failure: BaseException) -> str:
    """The type and the first line of an error, or where it was raised if it has no text."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    if not lines:
        frame = traceback.extract_tb(failure.__traceback__)[-1]
        lines = [f"(no text) in {frame.name}, {Path(frame.filename).name}:{frame.lineno}"]
    return f"{type(failure).__name__}: {lines[0]}"


@dataclass(frozen=True)
class Answer:
    """The answer of a rank: `ready`, `done`, `error`, `died` or `silent`."""

    kind: str
    error: float = 0.0
    text: str = ""
    seconds: float = 0.0


class Group:
    """`world` processes for one kind of engine. `used`: whether they have run anything yet."""

    def __init__(self, world: int, family: str) -> None:
        self.world, self.used = world, False
        self.folder = tempfile.TemporaryDirectory(prefix="shardproof-casebook-")
        self.processes: list[Any] = []
        self.pipes: list[Any] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["shardproof.casebook.preload"])
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (rank, world, family, self.folder.name, theirs)
            process = context.Process(target=rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        answers = self._collect(START_LIMIT)
        if any(answer.kind != "ready" for answer in answers):
            self.close()
            raise RuntimeError(f"{world} processes did not start in {START_LIMIT:.0f} s: {answers}")

    def ask(self, task: Task, limit: float) -> list[Answer]:
        """The answer of each rank within `limit` seconds."""
        self.used = True
        for pipe in self.pipes:
            pipe.send(task)
        return self._collect(limit)

    def _collect(self, limit: float) -> list[Answer]:
        """One answer from each rank. A rank that still computes at the limit gets more time: it may just be slow on a
        busy machine, while a rank that hangs uses no CPU time."""
        answers = [Answer("silent")] * self.world
        waiting: dict[Any, int] = dict(zip(self.pipes, range(self.world), strict=True))
        deadline, last = time.monotonic() + limit, time.monotonic() + PATIENCE * limit
        failed, spent = False, -math.inf
        while waiting:
            ready: list[Any] = multiprocessing.connection.wait(
                list(waiting), timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                now = sum(processor_seconds(process.pid) for process in self.processes)
                if failed or time.monotonic() > last or now - spent < 0.1:
                    break
                deadline, spent = time.monotonic() + LOOK, now
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = Answer(*pipe.recv())
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(GRACE)
                    answers[rank] = Answer("died", text=self.last_words(rank))
                if answers[rank].kind in ("error", "died"):
                    failed, deadline = True, min(deadline, time.monotonic() + GRACE)
        return answers

    def standing(self, rank: int) -> str:
        """The place in the case's script of a rank that does not answer."""
        path = Path(self.folder.name) / f"rank{rank}.stacks"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and not path.stat().st_size:
            self.processes[rank].join(0.05)
        self.processes[rank].join(0.2)  # the rest of the stack
        frames = re.findall(r'File "(.+?)", line (\d+) in (\S+)', path.read_text())
        names = [frame[2] for frame in frames]  # innermost first
        if "play" not in names:
            return f"rank {rank} is done"
        inside = frames[: names.index("play")]
        script = [frame for frame in inside if not frame[0].startswith(LIBRARIES)]
        file, line, name = (script or inside or frames)[0]
        return f"rank {rank} in {name} ({Path(file).name}:{line})"

    def last_words(self, rank: int) -> str:
        """How a process ended, and the output of its C++ code."""
        said = re.findall(r"what\(\):\s*(.+)", (Path(self.folder.name) / f"rank{rank}.out").read_text(errors="replace"))
        text = f"the process died, exit code {self.processes[rank].exitcode}"
        return f"{text}: {said[-1]}" if said else text

    def close(self) -> None:
        """End every process and its children."""
        for process in self.processes:
            for kill in (os.killpg, os.kill):  # the group exists only once the process has made it
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.folder.cleanup()
