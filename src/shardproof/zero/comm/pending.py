"""A collective: what it moves, one that is under way, and the thread for those of several parts."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch


class Size(NamedTuple):
    """What an operation moves: elements of the whole buffer, and whether ranks hold parts of it."""

    numel: int
    dtype: torch.dtype
    sharded: bool


# What nobody has waited for yet, or what has failed. A model may go while its messages are on their way; to free a
# buffer that gloo is filling would block for ever, and gloo's thread aborts a program at whose end it frees one.
_under_way: set[Pending] = set()


class Pending:
    """A collective under way. `wait()` returns its result, safe to use on the current stream."""

    __slots__ = ("_finish", "_keep", "_result", "_works")

    def __init__(
        self, works: list[Any], result: torch.Tensor, keep: Any = None, finish: Callable[[], object] | None = None
    ) -> None:
        self._works, self._result, self._keep, self._finish = works, result, keep, finish
        _under_way.add(self)

    def wait(self) -> torch.Tensor:
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()
        _under_way.discard(self)
        self._works, self._keep, self._finish = [], None, None
        return self._result


class Worker:
    """A thread that does one thing after the other. The end of the program does not wait for it, as it would for an
    executor's: what this rank waits for there may never come."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        weakref.finalize(self, self._jobs.put, None).atexit = False
        threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True).start()

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((future, job))
        return future

    def rests(self, seconds: float) -> bool:
        """Wait until it has done everything; whether it did within so many seconds."""
        with contextlib.suppress(TimeoutError):
            self.submit(bool).result(seconds)
            return True
        return False


def _work(jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (given := jobs.get()) is not None:
        future, job = given
        try:
            future.set_result(job())
        except BaseException as problem:  # who asks for the result is told
            future.set_exception(problem)
        del given, future, job  # with buffers that it would keep until the next one comes
