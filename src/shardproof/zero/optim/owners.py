"""Matrix optimizers: each parameter is updated whole, on the rank that owns it.

The update of Muon, Shampoo or Adafactor needs a whole matrix, and a rank holds a slice. So parameters are assigned to
owner ranks, balanced by size. In a step, the slices of values and gradients travel to the owner, which updates the
whole parameter and keeps its state, and the new slices travel back. Meanwhile each rank holds as much again as its
shard, and it sends three times its slices: less than a gather and a reduction, which send a slice to every rank. A
parameter keeps its owner, where its state is, when others join.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from shardproof.zero.tensors.parameter import ShardedParameter

Dealt = list[list[tuple["ShardedParameter", torch.Tensor]]]  # for each owner the slices of what it owns


class Owners:
    """The owners of the parameters of one engine that an optimizer updates.

    Args:
        params: all of them, in the same order on all ranks.
    """

    def __init__(self, params: list[ShardedParameter]) -> None:
        self.comm = params[0].flat.engine.comm
        loads = [0] * self.comm.shards
        # First those that have an owner; then the largest first, to the rank with the least.
        for p in sorted(params, key=lambda p: (p.owner is None, -p.flat.numels[p.index])):
            if p.owner is None:
                p.owner = loads.index(min(loads))
            loads[p.owner] += p.flat.numels[p.index]

    def mine(self, p: ShardedParameter) -> bool:
        return p.owner == self.comm.shard_rank

    def bring(self, slices: list[tuple[ShardedParameter, torch.Tensor]]) -> dict[int, torch.Tensor]:
        """Send this rank's slices, 1-D and of one dtype, to the owners. Collective.

        Returns: by identity of a parameter that this rank owns, the whole, in its shape.
        """
        there = self._by_owner(slices)
        sends = torch.cat([piece for pairs in there for _, piece in pairs]).to(self.comm.device)
        mine = [p for p, _ in there[self.comm.shard_rank]]
        sizes = [sum(_held(p, rank) for p in mine) for rank in range(self.comm.shards)]
        home = slices[0][0].flat.device
        received = [part.to(home) for part in self.comm.exchange(sends, _sizes(there), sizes)]
        pieces = [iter(part.split([_held(p, r) for p in mine])) for r, part in enumerate(received)]
        return {id(p): torch.cat([next(part) for part in pieces]).view(p.flat.shapes[p.index]) for p in mine}

    def take_back(self, slices: list[tuple[ShardedParameter, torch.Tensor]], whole: dict[int, torch.Tensor]) -> None:
        """The reverse: overwrite this rank's slices with what their owners have. Collective."""
        there = self._by_owner(slices)
        mine = [p for p, _ in there[self.comm.shard_rank]]
        pieces = [whole[id(p)].reshape(-1).split([_held(p, r) for r in range(self.comm.shards)]) for p in mine]
        nothing = slices[0][1][:0]
        sends = torch.cat([nothing, *(piece[r] for r in range(self.comm.shards) for piece in pieces)])
        sizes = [sum(_held(p, rank) for p in mine) for rank in range(self.comm.shards)]
        received = self.comm.exchange(sends.to(self.comm.device), sizes, _sizes(there))
        for pairs, part in zip(there, received, strict=True):
            for (_, piece), new in zip(pairs, part.split([piece.numel() for _, piece in pairs]), strict=True):
                piece.copy_(new)

    def _by_owner(self, slices: list[tuple[ShardedParameter, torch.Tensor]]) -> Dealt:
        dealt: Dealt = [[] for _ in range(self.comm.shards)]
        for p, piece in slices:
            dealt[cast("int", p.owner)].append((p, piece))
        return dealt


def _sizes(there: Dealt) -> list[int]:
    return [sum(piece.numel() for _, piece in pairs) for pairs in there]


def _held(p: ShardedParameter, rank: int) -> int:
    """How many elements of `p` a rank of the shard group holds."""
    flat, first = p.flat, p.flat.offsets[p.index]
    start = rank * flat.shard_numel
    return max(0, min(first + flat.numels[p.index], start + flat.shard_numel) - max(first, start))
