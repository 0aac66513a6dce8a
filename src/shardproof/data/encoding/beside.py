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
MOST = 16  # processes; what they make is taken in by one
_told: ContextVar[Callable[[int, int, str], None]] = ContextVar("_told")


@contextmanager
def telling(told: Callable[[int, int, str], None]) -> Iterator[None]:
    """Inside, `told(done, count, work)` hears how far long work is, in units of any size; without a name it is the
    encoding of rows."""
    before = _told.set(told)
    try:
        yield
    finally:
        _told.reset(before)


def told_of(made: Iterable[T], count: int, work: str = "") -> Iterator[T]:
    """The same `count` things, while whoever wants to know hears how many of them there are."""
    told = _told.get(None)
    for number, one in enumerate(made, 1):
        yield one
        if told is not None:
            told(number, count, work)


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def as_many_as_help(wanted: int) -> int:
    """Processes that encode rows before training, when nothing else uses the cores; none where `wanted` is 0."""
    return max(wanted, min(cores(), MOST)) if wanted else 0


def in_order(make: Callable[[int], T], count: int, workers: int) -> Iterator[T]:
    """`make(0)`, `make(1)` ... `make(count - 1)`, made by `workers` processes; 0: by this one.

    Raises:
        ShardproofError: the one that `make` raised, as it is.
    """
    import torch
    from torch.utils.data import DataLoader

    if sys.platform != "linux" or current_process().daemon:  # processes import everything anew there, or may have none
        workers = 0
    with _without_threads():
        made = iter(
            DataLoader(
                _Made(make, count),  # type: ignore[arg-type]  # by its length and its items
                batch_size=None,
                num_workers=workers,
                collate_fn=_as_it_is,
                generator=torch.Generator(),  # else it draws from the one of training
                multiprocessing_context="fork" if workers else None,
            )
        )
    for result, problem in told_of(made, count):
        if problem is not None:
            raise problem
        yield result


class _Made:
    """What a worker makes; an error of ours as a value, for a DataLoader would write its place in our code into it."""

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
    """Threads of tokenizers do not survive a fork, and processes are enough."""
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
