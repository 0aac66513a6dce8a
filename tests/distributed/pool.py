"""A pool of processes that tests share.

Importing what a rank needs costs seconds, running a test on one that is there costs milliseconds. So all ranks are
forks of one process that has imported it, and there is one pool of them per world size, started when the first test
asks for it; each rank keeps one gloo process group over the whole pool. A test sends a module-level function by import
path, with picklable arguments, and gets back the list of what the ranks returned.

What goes wrong is told in the words of the rank it went wrong on:

- an exception comes back as `RemoteError` with the rank and its traceback, and where the other ranks were by then;
- a hang ends after a timeout with `PoolTimeout` and the Python stacks of every rank;
- ranks that disagree about the collectives of a test (one posts an operation more than the other) are caught by a
  closing barrier, in the test that did it rather than in the next one.

After any failure the processes are replaced, so that the next test starts clean.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEFAULT_TIMEOUT = 60.0
START_TIMEOUT = 180.0
_frozen_modules = 0
GRACE = 5.0  # how long the other ranks may take to end by themselves after one has failed


class RemoteError(AssertionError):
    """One or more ranks raised; the text holds their tracebacks."""


class PoolTimeout(AssertionError):
    """Not every rank came back in time; the text holds the stacks of all."""


def _address(fn: Callable[..., Any]) -> tuple[str, str]:
    if "<" in fn.__qualname__:
        raise TypeError(f"{fn.__qualname__} is not a module-level function: ranks find it by its import path")
    return fn.__module__, fn.__qualname__


def _find(module: str, qualname: str) -> Callable[..., Any]:
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _fresh_state() -> None:
    """What a test may have left behind in a rank that the next one must not see."""
    global _frozen_modules
    import torch

    gc.collect()
    if len(sys.modules) > _frozen_modules:
        gc.freeze()  # what was imported stays: to look through it each time took 0.2 s, more than most tests
        _frozen_modules = len(sys.modules)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)


def _end_groups() -> None:
    """End the process groups that tests have made: a thread of each wakes a hundred times a second for ever, and with
    some of them a rank that only waits takes a fifth of a core. The default group stays, and the engine's beside it.

    torch names a group that only its members make by how many names there are. Were there fewer again, a name would
    come a second time, and in the store, under this name, the addresses of a group that has ended. So names stay.
    """
    import torch.distributed as dist

    torch_world = dist.distributed_c10d._world
    name = dist.group.WORLD.group_name
    engine, saving = (sys.modules.get(f"shardproof.{m}") for m in ("zero.comm.collectives", "checkpoint.saving"))
    ours = {getattr(engine, "_second_groups", {}).get(name, (None, ""))[1]}
    channel = getattr(saving, "_channels", {}).get(name)
    if channel is not None and channel[1].group is not None:  # one rank needs none
        ours.add(channel[1].group.group_name)
    for group in list(torch_world.pg_map):
        if group is not dist.group.WORLD and group.group_name not in ours:
            ended = group.group_name
            dist.destroy_process_group(group)
            torch_world.pg_names[object()] = ended


def _rank_main(rank: int, world: int, folder: str, pipe: Any) -> None:
    """A rank: join the group, then run what comes through the pipe until it closes."""
    out = open(os.path.join(folder, f"rank{rank}.out"), "w", buffering=1)  # noqa: SIM115 - lives as long as the process
    stacks = open(os.path.join(folder, f"rank{rank}.stacks"), "w")  # noqa: SIM115
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    sys.stdout = sys.stderr = out
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(stacks)  # what a crash leaves, which no answer tells of
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the pool

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    store = dist.FileStore(os.path.join(folder, "rendezvous"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    dist.barrier()
    pipe.send(("ready", None))
    while True:
        try:
            (module, qualname), args, kwargs = pipe.recv()
        except EOFError:
            break
        try:
            _fresh_state()
            _end_groups()
            result = _find(module, qualname)(*args, **kwargs)
            payload = pickle.dumps(result)
            dist.barrier()
            pipe.send(("ok", payload))
        except BaseException:  # a rank must report whatever ends a test, or the parent can only guess
            pipe.send(("error", traceback.format_exc()))
    os._exit(0)  # the group has no peers left to say goodbye to


# Some groups outlive their end, and with them threads that wake a hundred times a second: a pool that is not used for
# minutes took a fifth of a core. One with so many threads is started anew.
MOST_THREADS = 100


def _threads(pid: int) -> int:
    task = f"/proc/{pid}/task"
    return len(os.listdir(task)) if os.path.isdir(task) else 0


@functools.cache
def _start_fork_server() -> None:
    """Start the process that ranks are forks of. It is told where to find modules by the environment only."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    multiprocessing.set_forkserver_preload(["distributed.preload"])
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class Pool:
    """`world` ranks with one gloo group; started on first use and again after a failure."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._ranks: list[Any] = []
        self._pipes: list[Any] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    # -- life ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        _start_fork_server()
        self._folder = tempfile.TemporaryDirectory(prefix="shardproof-pool-")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            args = (rank, self.world, self._folder.name, theirs)
            process = context.Process(target=_rank_main, args=args, daemon=True, name=f"rank{rank}of{self.world}")
            process.start()
            theirs.close()
            self._ranks.append(process)
            self._pipes.append(ours)
        answers = self._collect(START_TIMEOUT)
        if any(answer is None or answer[0] != "ready" for answer in answers):
            raise self._failure(answers, f"the pool of {self.world} ranks did not start in {START_TIMEOUT:.0f} s")

    def close(self) -> None:
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._ranks, self._pipes, self._folder = [], [], None

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._ranks]

    # -- running ---------------------------------------------------------------------------------------------------

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT, **kwargs: Any) -> list[Any]:
        """Run `fn(*args, **kwargs)` on every rank; return what each returned, in rank order.

        Raises:
            RemoteError: a rank raised.
            PoolTimeout: a rank did not come back within `timeout` seconds.
        """
        message = (_address(fn), args, kwargs)
        if not self._ranks:
            self._start()
        for pipe in self._pipes:
            pipe.send(message)
        try:
            answers = self._collect(timeout)
        except BaseException:  # the limit of a test, or Ctrl-C: what the ranks still do answers no later call
            self.close()
            raise
        if all(answer is not None and answer[0] == "ok" for answer in answers):
            if max(map(_threads, self.pids)) > MOST_THREADS:
                self.close()
            return [pickle.loads(answer[1]) for answer in answers]
        raise self._failure(answers, f"{fn.__qualname__} did not come back in {timeout:.0f} s")

    def _collect(self, timeout: float) -> list[tuple[str, Any] | None]:
        """One answer per rank; None for a rank that was silent until the end. An error shortens the wait for others."""
        answers: list[tuple[str, Any] | None] = [None] * self.world
        waiting = dict(zip(self._pipes, range(self.world), strict=True))
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in multiprocessing.connection.wait(list(waiting), timeout=left):
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    self._ranks[rank].join()
                    told = (Path(self._folder.name) / f"rank{rank}.stacks").read_text()[-6000:] if self._folder else ""
                    answers[rank] = ("error", f"the process died, exit code {self._ranks[rank].exitcode}\n{told}")
                if answers[rank][0] == "error":
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _failure(self, answers: list[tuple[str, Any] | None], hang: str) -> AssertionError:
        silent = [rank for rank, answer in enumerate(answers) if answer is None]
        stacks = self._stacks(silent)
        parts = []
        for rank, answer in enumerate(answers):
            if answer is not None and answer[0] == "error":
                parts.append(f"--- rank {rank} of {self.world} raised ---\n{answer[1]}{self._output(rank)}")
        failed = bool(parts)
        for rank in silent:
            parts.append(f"--- rank {rank} of {self.world} was still here ---\n{stacks[rank]}{self._output(rank)}")
        self.close()
        if failed:
            return RemoteError("\n" + "\n".join(parts))
        return PoolTimeout(f"{hang}\n" + "\n".join(parts))

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Ask each rank for the stacks of its threads: faulthandler answers even where Python code cannot."""
        assert self._folder is not None
        found = {}
        for rank in ranks:
            path = Path(self._folder.name) / f"rank{rank}.stacks"
            before = path.stat().st_size if path.exists() else 0
            if self._ranks[rank].is_alive() and path.exists():
                os.kill(self._ranks[rank].pid, signal.SIGUSR1)
                deadline = time.monotonic() + 3.0
                size = -1
                while time.monotonic() < deadline and (path.stat().st_size != size or size <= before):
                    size = path.stat().st_size
                    self._ranks[rank].join(0.05)  # a bounded wait for the file to grow and come to rest
            found[rank] = path.read_text()[before:] if path.exists() else "(no stacks: it had not started)\n"
        return found

    def _output(self, rank: int) -> str:
        assert self._folder is not None
        path = Path(self._folder.name) / f"rank{rank}.out"
        tail = path.read_text(errors="replace")[-2000:] if path.exists() else ""
        return f"--- rank {rank} printed (tail) ---\n{tail}\n" if tail.strip() else ""


class Pools:
    """The pools of a test session, by world size."""

    def __init__(self) -> None:
        self._by_world: dict[int, Pool] = {}

    def __getitem__(self, world: int) -> Pool:
        return self._by_world.setdefault(world, Pool(world))

    def run(self, world: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return self[world].run(fn, *args, **kwargs)

    def close(self) -> None:
        for pool in self._by_world.values():
            pool.close()
