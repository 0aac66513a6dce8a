"""How an engine takes part in the rounds of the ranks. See [Note: streams] in consensus.py."""

from __future__ import annotations

import fnmatch
import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from shardproof.zero.comm.pending import Size
from shardproof.zero.exposed import Exposed
from shardproof.zero.ranks.consensus import Streams, tag_of

if TYPE_CHECKING:
    from shardproof.zero.comm.collectives import Collectives
    from shardproof.zero.comm.pending import Pending
    from shardproof.zero.device import BufferPool
    from shardproof.zero.schedule.edits import Edits
    from shardproof.zero.schedule.gradients import Gradients
    from shardproof.zero.units.flat import Flat

log = logging.getLogger("shardproof.zero")


class Watcher(Protocol):
    """Is told what an engine does on this rank, immediately and in order. It must not call the engine.

    `wanted` comes before an operation starts, `waits` is around the wait for its result; operations that a rank takes
    part in only for others are not `wanted`, but may be waited for. `meets` is around a meeting of all ranks.
    """

    def wanted(self, flat: Flat, operation: int) -> None: ...
    def waits(self, operation: int) -> AbstractContextManager[None]: ...
    def meets(self, what: str) -> AbstractContextManager[None]: ...


class TakesTurns:
    """The part of the engine that talks to the streams. An operation is `2 * flat.index` (gather) or that plus one
    (reduce).

    Attributes:
        number: which engine of its process group this is, the same on all ranks.
        declared: patterns of units that, as the user says, not every rank uses; `dynamic_units`: those found to be so.
        adaptive: whether ranks may differ; if not, the first difference raises.
        used: flats (by index) that this rank has gathered or reduced since the last end of a step.
        sent, turns: how often this rank has sent data for an operation, and how many rounds of it there were.
        watcher: is told of operations; or None.
        exposed: sums the time spent waiting for data.
    """

    comm: Collectives
    pool: BufferPool
    gradients: Gradients
    edits: Edits
    sharded: bool
    deterministic: bool
    declared: tuple[str, ...] = ()
    adaptive = True
    watcher: Watcher | None = None

    @property
    def flats(self) -> list[Flat]:
        raise NotImplementedError

    def running(self) -> str:
        """The name of the innermost unit whose forward or recomputation is under way, or nothing."""
        raise NotImplementedError

    def hold_nothing(self) -> None:
        """Drop all gathered buffers."""
        raise NotImplementedError

    def unseen(self) -> AbstractContextManager[Any]:
        """Inside, modes of user code that count operations (selective checkpointing) do not see ours."""
        return _disable_current_modes()

    def take_seat(self) -> None:
        """Join the streams of the process group."""
        self.streams = Streams.of(self.comm)
        self.number = self.streams.join(self)
        # The streams keep `comm`, as other ranks may still use a model that is gone here; but not its buffers.
        weakref.finalize(self, self.comm.forget).atexit = False
        self.exposed = Exposed(self.comm.device)
        self.dynamic_units: set[str] = set()
        self.used: set[int] = set()
        self.sent: Counter[int] = Counter()
        self.turns: Counter[int] = Counter()

    def tag(self, operation: int) -> int:
        return tag_of(self.number, operation)

    def announce(self, flat: Flat) -> None:
        """Register the operations on a new flat."""
        for operation, dtype in ((2 * flat.index, flat.dtype), (2 * flat.index + 1, flat.grad_dtype)):
            self.streams.announce(self, operation, Size(flat.numel, dtype, self.sharded))

    def want(self, flat: Flat, operation: int) -> int:
        """This rank needs an operation on `flat`. Returns its position, to be settled before the result is used; see
        `may_start`."""
        self.note_use(flat, operation)
        self.sent[operation] += 1
        position = self.streams.want(self, operation)
        self.turns[operation] += self.streams.done > position  # planned
        return position

    def note_use(self, flat: Flat, operation: int) -> None:
        """This rank itself needs an operation."""
        if self.watcher is not None:
            self.watcher.wanted(flat, operation)
        self.used.add(flat.index)

    def count_reduction(self, flat: Flat, nbytes: int) -> None:
        """Note in the statistics that this rank reduces `nbytes`."""
        counters = flat.unit.counters
        counters.reductions += 1
        several = self.comm.size - 1 if self.deterministic else 2
        counters.bytes_reduced += nbytes * (1 if self.sharded else several)
        if self.sharded and self.comm.replicas > 1:
            counters.bytes_between_replicas += 2 * nbytes // self.comm.shards
        counters.bytes_between_nodes += self._leaving(nbytes)

    def _leaving(self, nbytes: int) -> int:
        """Bytes that a reduction of `nbytes` sends to other machines."""
        leaving = self.comm.leaving
        if self.deterministic:
            return leaving.unadded(nbytes, self.sharded)
        if not self.sharded:
            return leaving.over_all(nbytes)
        return leaving.in_row(nbytes) + leaving.in_column(nbytes // self.comm.shards)

    def may_start(self, operation: int, position: int) -> bool:
        """Whether the operation may start now: it is planned, or does not have to start in its round."""
        return self.streams.done > position or not self.has_turns(operation)

    def wait(self, pending: Pending, operation: int) -> torch.Tensor:
        """The result of an operation under way."""
        watched = nullcontext() if self.watcher is None else self.watcher.waits(operation)
        with self.streams.waiting(self.number, operation), watched, self.exposed.waits():
            return pending.wait()

    def meet(self, what: str, place: tuple[int, int] | None = None) -> None:
        """Wait until all ranks are here for the same reason, one of `consensus.MEETINGS`. If the next exchange concerns
        one parameter, `place` names its flat and index, so that all ranks mean the same one."""
        if self.comm.size == 1:
            return
        watched = nullcontext() if self.watcher is None else self.watcher.meets(what)
        with watched, torch.inference_mode(False):  # operations that start here are awaited elsewhere
            self.streams.meet(self, what, place)

    def has_turns(self, operation: int) -> bool:
        """Whether an operation must start in the same order on all ranks, and so in its round. Tagged ones may start
        before it; if ranks may not differ, all may."""
        return self.adaptive and not self.comm.is_tagged(operation, self.sharded)

    def is_dynamic(self, name: str) -> bool:
        """Whether the unit is known not to be used by every rank."""
        return name in self.dynamic_units or any(fnmatch.fnmatchcase(name, f"{p}*") for p in self.declared)

    def turn(self, operation: int, mine: bool) -> None:
        """The round of `operation` has come: take part, even if this rank does not need it."""
        self.turns[operation] += 1
        if self.has_turns(operation):
            if mine:
                if operation % 2:
                    self.gradients.start_next()
                return
        elif self.turns[operation] <= self.sent[operation]:
            return
        self._lend(operation)

    def pay(self, operation: int) -> None:
        """Take part in a planned operation that this rank does not need."""
        self.turns[operation] += 1
        self._lend(operation)

    def _lend(self, operation: int) -> None:
        self.sent[operation] += 1
        flat = self.flat_at(operation // 2)
        with torch.inference_mode(False), torch.no_grad():
            if operation % 2:
                self.gradients.lend(flat)
            else:
                flat.take_in_edits()
                whole = self.pool.take(flat.numel, flat.dtype)
                pending = flat.gather(whole, self.tag(operation))
                self.wait(pending, operation)

    def agree(self, flags: torch.Tensor, numbers: Sequence[int]) -> list[bool]:
        """At the end of a step: the element-wise maximum of `flags` over ranks, in place. Returns which of `numbers`
        are the same on all ranks. Logs, once, which units only some ranks have used."""
        if self.comm.size == 1:
            return [True] * len(numbers)
        flats = self.flats
        used = [flat.index in self.used for flat in flats]
        self.used.clear()
        same = self.streams.agree_on_plan(self, flags, [*numbers, *used])
        differ = [flat.unit.name for flat, alike in zip(flats, same[len(numbers) :], strict=True) if not alike]
        news = [name for name in dict.fromkeys(differ) if not self.is_dynamic(name)]
        if news and self.comm.rank == 0:
            names = ", ".join(f"'{name}'" for name in news)
            log.warning("not every rank uses %s: those that do not lend their part", names)
        self.dynamic_units.update(news)
        return same[: len(numbers)]

    def flat_at(self, index: int) -> Flat:
        return next(flat for flat in self.flats if flat.index == index)
