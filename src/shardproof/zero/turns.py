"""What an engine does in the rounds that the ranks hold. See [Note: streams] in consensus.py."""

from __future__ import annotations

import fnmatch
from collections import Counter
from typing import TYPE_CHECKING

import torch

from shardproof.zero.consensus import Streams

if TYPE_CHECKING:
    from shardproof.zero.collectives import Collectives
    from shardproof.zero.device import BufferPool
    from shardproof.zero.gradients import Gradients
    from shardproof.zero.unit import Flat


class TakesTurns:
    """The part of the engine that talks to the streams. An operation is `2 * flat.index` (gather) or that plus one
    (reduce).

    Attributes:
        number: which engine of its process group this is, the same on all ranks.
        declared: patterns of units that the user says not every rank uses; `dynamic_units` those seen to be so.
        adaptive: whether ranks may differ; if not, the first difference raises.
        sent, turns: how often this rank has sent data for an operation, and how many rounds of it there were.
    """

    comm: Collectives
    pool: BufferPool
    gradients: Gradients
    sharded: bool
    declared: tuple[str, ...] = ()
    adaptive = True

    @property
    def flats(self) -> list[Flat]:
        raise NotImplementedError

    def take_seat(self) -> None:
        """Join the streams of the process group."""
        self.streams = Streams.of(self.comm)
        self.number = self.streams.join(self)
        self.dynamic_units: set[str] = set()
        self.sent: Counter[int] = Counter()
        self.turns: Counter[int] = Counter()

    def tag(self, operation: int) -> int:
        """The tag of an operation's messages; engines on one group do not share tags."""
        return self.number * 65536 + operation

    def want(self, operation: int) -> int:
        """Tell the other ranks what comes next."""
        self.sent[operation] += 1
        return self.streams.want(self, operation)

    def meet(self, what: str) -> None:
        """Wait until all ranks are here for the same thing, one of `consensus.MEETINGS`."""
        if self.comm.size > 1:
            self.streams.meet(self, what)

    def has_turns(self, operation: int) -> bool:
        """Whether an operation must start in the same order on all ranks, and so in its round. What is exchanged by
        hand may start before; where ranks may not differ, so may all."""
        return self.adaptive and not (self.comm.by_hand and (operation % 2 == 0 or self.sharded))

    def is_dynamic(self, name: str) -> bool:
        """Whether it is known that not every rank uses the unit."""
        return name in self.dynamic_units or any(fnmatch.fnmatchcase(name, f"{p}*") for p in self.declared)

    def turn(self, operation: int, mine: bool) -> None:
        """A round of `operation` has come: take part, even if this rank did not ask for it."""
        self.turns[operation] += 1
        if self.has_turns(operation):
            if mine:
                if operation % 2:
                    self.gradients.start_next()
                return
        elif self.turns[operation] <= self.sent[operation]:
            return
        self.sent[operation] += 1
        flat = self.flat_at(operation // 2)
        with torch.inference_mode(False), torch.no_grad():
            if operation % 2:
                self.gradients.lend(flat)
            else:
                whole = self.pool.take(flat.numel, flat.dtype)
                self.comm.gather(whole, flat.shard.to(flat.dtype), tag=self.tag(operation)).wait()

    def flat_at(self, index: int) -> Flat:
        return next(flat for flat in self.flats if flat.index == index)
