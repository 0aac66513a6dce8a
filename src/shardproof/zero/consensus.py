"""How ranks that differ agree.

[Note: streams]
Before each collective a rank sends every other rank one word: what it wants next. So every rank has a
stream of words, in order, that all ranks read. The words travel beside the data and are read when a result
is needed, when they have long arrived. Where the heads of all streams are equal, everybody meant the same
operation and goes on. Where they differ, all ranks see the same heads and draw the same conclusion: the
smallest word is carried out by all, those who did not ask for it lend their shard (a gather) or zeros (a
reduction), and only those who asked go on to their next word. So any path on any rank comes to its end
as long as each rank reaches its step. What needs all ranks at once (the end of a step, norms, a state dict) is a
meeting: its words are the largest and cannot be lent, so ranks that are at different meetings know it at once.

On the CPU data is sent before its round comes, and may so be taken by an earlier round of the same operation.
That is harmless (a gather sends the same weights, reductions add up) as long as every rank sends once for each
round: `Engine.turn` counts. So nobody ever waits for data of a later round than its own.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, cast

from shardproof.zero.watchdog import Wait, Watchdog

if TYPE_CHECKING:
    from shardproof.zero.collectives import Collectives
    from shardproof.zero.turns import TakesTurns

log = logging.getLogger("shardproof")

_OPERATIONS = 1 << 24  # words of one engine
_MEETING = 1 << 48

MEETINGS = (
    "finish a step",
    "compute norms",
    "collect a gradient",
    "unscale gradients",
    "differentiate a gradient",
    "edit a parameter in place",
    "take in what was attached to the model",
    "enter shardproof.whole",
    "leave shardproof.whole",
    "collect the state dict",
    "load a state dict",
)

# Engines that share a process group take turns in one order, so they share its streams, which live as long as the
# group: ranks collect models at different times. By name of the group, with the identity of the group itself.
_streams: dict[str, tuple[int, Streams]] = {}


class Streams:
    """The streams of one process group.

    Attributes:
        mine: words of this rank that no round has carried out yet; `theirs` those of the others, by rank.
        done: how many words of this rank were carried out.
        rounds_apart: how many rounds found ranks that differ.
        seconds: time spent waiting for words.
        watchdog: notices ranks that never come; None where there is one rank.
    """

    def __init__(self, comm: Collectives) -> None:
        self.comm = comm
        self.engines: weakref.WeakValueDictionary[int, TakesTurns] = weakref.WeakValueDictionary()
        self.count = 0
        self.mine: deque[int] = deque()
        self.theirs: list[deque[int]] = [deque() for _ in range(comm.size)]
        self.posted = self.done = self.rounds_apart = 0
        self.seconds = 0.0
        self.watchdog = Watchdog(comm, self.describe) if comm.size > 1 else None

    @staticmethod
    def of(comm: Collectives) -> Streams:
        identity, known = _streams.get(comm.group_name, (0, None))
        if known is None or identity != comm.group_identity:
            known = Streams(comm)
            _streams[comm.group_name] = comm.group_identity, known
        return known

    def join(self, engine: TakesTurns) -> int:
        """Register an engine; its number is the same on all ranks, because they shard in the same order."""
        self.engines[self.count] = engine
        self.count += 1
        return self.count - 1

    def want(self, engine: TakesTurns, operation: int) -> int:
        """Tell everybody what this rank wants next. Returns what to pass to `settle`."""
        return self._post(engine.number * _OPERATIONS + operation)

    def meet(self, engine: TakesTurns, what: str) -> None:
        """Wait until all ranks are here for the same of `MEETINGS`; what they wanted before is carried out."""
        self.settle(self._post(_MEETING + engine.number * len(MEETINGS) + MEETINGS.index(what)))

    def _post(self, word: int) -> int:
        self.comm.send_word(word)
        self.mine.append(word)
        self.posted += 1
        return self.posted - 1

    def settle(self, position: int) -> None:
        """Hold rounds until this rank's word at `position` was carried out."""
        while self.done <= position:
            self._round()

    def advance(self) -> None:
        """Hold the rounds that need no waiting."""
        while self.mine and all(theirs or self.comm.word_is_here(rank) for rank, theirs in self._others()):
            self._round()

    def _others(self) -> list[tuple[int, deque[int]]]:
        return [(rank, theirs) for rank, theirs in enumerate(self.theirs) if rank != self.comm.rank]

    def _round(self) -> None:
        heads = [self._head(rank) for rank in range(self.comm.size)]
        chosen = min(heads)
        if any(head != chosen for head in heads):
            self._apart(chosen, heads)
        for rank, head in enumerate(heads):
            if head == chosen:
                (self.mine if rank == self.comm.rank else self.theirs[rank]).popleft()
        mine = heads[self.comm.rank] == chosen
        self.done += mine
        engine = self.engines.get(chosen // _OPERATIONS)
        if engine is not None:  # None: a meeting, or a model that is gone with a gather never used
            engine.turn(chosen % _OPERATIONS, mine)

    def _head(self, rank: int) -> int:
        if rank == self.comm.rank:
            return self.mine[0]
        if not self.theirs[rank]:
            watchdog, start = cast("Watchdog", self.watchdog), time.monotonic()
            watchdog.waiting = Wait(rank, self.mine[0], start)
            try:
                self.theirs[rank].append(self.comm.receive_word(rank))
            except RuntimeError:
                raise watchdog.gone(rank) from None
            watchdog.waiting = None
            self.seconds += time.monotonic() - start
        return self.theirs[rank][0]

    def _apart(self, chosen: int, heads: list[int]) -> None:
        """Ranks differ: refuse where that cannot be mended, and say so once for each unit."""
        self.rounds_apart += 1
        engine = self.engines.get(chosen // _OPERATIONS)
        if engine is None and chosen < _MEETING:
            return
        if engine is None or not engine.adaptive:
            lines = "\n".join(f"  rank {rank} wants to {self.describe(head)}" for rank, head in enumerate(heads))
            advice = (
                "What needs all ranks must be called on all of them, in the same order."
                if engine is None
                else "Declare the units that only some ranks use: shardproof.shard(model, stage, dynamic=['visual'])."
            )
            raise cast("Watchdog", self.watchdog).error(f"The ranks are not doing the same thing:\n{lines}\n{advice}")
        name = engine.flat_at(chosen % _OPERATIONS // 2).unit.name
        if engine.comm.rank == 0 and not engine.is_dynamic(name):
            log.warning("not every rank uses '%s': from now on those that do not lend their part of it", name)
        engine.dynamic_units.add(name)

    def describe(self, word: int) -> str:
        if word >= _MEETING:
            return MEETINGS[(word - _MEETING) % len(MEETINGS)]
        engine = self.engines.get(word // _OPERATIONS)
        flat = engine.flat_at(word % _OPERATIONS // 2) if engine is not None else None
        return f"{'reduce the gradients of' if word % 2 else 'gather'} '{flat.unit.name if flat else '?'}'"
