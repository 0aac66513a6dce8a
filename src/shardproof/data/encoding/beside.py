"""Rows encoded by several processes, in their order."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing import current_process
from typing import Any, TypeVar

from shardproof.errors import ShardproofError

T = TypeVar("T")

THREADS = "TOKENIZERS_PARALLELISM"
MOST = 16  # processes; their output goes to a single one
_told: ContextVar[Callable[[int, int, str], None]] = ContextVar("_told")


@contextmanager
def telling(told: Callable[[int, int, str], None]) -> Iterator[None]:
    """In this context, `told(done, count, work)` is called with the progress of long work, in units of any size; an
    empty `work` means encoding rows."""
    before = _told.set(told)
    try:
        yield
    finally:
        _told.reset(before)


def told_of(made: Iterable[T], count: int, work: str = "") -> Iterator[T]:
    """The same `count` items, reporting progress to the callback of `telling`."""
    told = _told.get(None)
    for number, one in enumerate(made, 1):
        yield one
        if told is not None:
            told(number, count, work)


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def as_many_as_help(wanted: int) -> int:
    """The number of processes that encode rows before training, when nothing else uses the cores; 0 if `wanted` is
    0."""
    return max(wanted, min(cores(), MOST)) if wanted else 0


def in_order(make: Callable[[int], T], count: int, workers: int) -> Iterator[T]:
    """`make(0)`, `make(1)` ... `make(count - 1)`, computed by `workers` processes; 0: by this one.

    Raises:
        ShardproofError: the one that `make` raised, unchanged.
    """
    import torch
    from torch.utils.data import DataLoader

    if sys.platform != "linux" or current_process().daemon:  # spawned processes re-import all; daemons may have none
        workers = 0
    with _without_threads():
        made = iter(
            DataLoader(
                _Made(make, count),  # type: ignore[arg-type]  # by its length and its items
                batch_size=None,
                num_workers=workers,
                collate_fn=_as_it_is,
                generator=torch.Generator(),  # otherwise it would draw from the training's generator
                multiprocessing_context="fork" if workers else None,
            )
        )
    for result, problem in told_of(made, count):
        if problem is not None:
            raise problem
        yield result


class _Made:
    """The results of a worker; a ShardproofError is returned as a value, since a DataLoader would put a traceback into
    its message."""

    def __init__(self, make: Callable[[int], Any], count: int) -> None:
        self._make, self._count = make, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Any, ShardproofError | None]:
        try:
            return self._make(index), None
        except ShardproofError as problem:
            return None, problem


@contextmanager
def _without_threads() -> Iterator[None]:
    """Turn off the threads of tokenizers: they do not survive a fork, and the processes are enough."""
    before = os.environ.get(THREADS)
    os.environ[THREADS] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[THREADS]
        else:
            os.environ[THREADS] = before


def _as_it_is(value: Any) -> Any:
    return value
