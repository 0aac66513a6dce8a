"""What a step sees of one flat: this rank's slices of its parameters."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch

from shardproof.zero.device import address_of

if TYPE_CHECKING:
    from shardproof.zero.tensors.parameter import ShardedParameter
    from shardproof.zero.units.flat import Flat


class Slices:
    """The slices of one flat that a step sees, as they are when it begins."""

    def __init__(self, flat: Flat, params: list[ShardedParameter]) -> None:
        self.flat, self.params = flat, params
        self.locals = [flat.locals[p.index] for p in params]
        self.grads: list[torch.Tensor | None] = [None] * len(params)
        if flat.grad is not None:
            grads = flat.grad_locals
            self.grads = [grads[p.index] if flat.has_grad[p.index] else None for p in params]
        for local, grad in zip(self.locals, self.grads, strict=True):
            local.grad = grad
        self.versions = [local._version for local in self.locals]
        self.at = [local.data_ptr() for local in self.locals]

    def take_back(self) -> list[int]:
        """Apply what the step did to them. Returns the indices of parameters whose values have changed."""
        versions = [local._version for local in self.locals]
        left = [local.grad for local in self.locals]
        for local in self.locals:
            local.grad = None
        if self.at != [local.data_ptr() for local in self.locals] or not all(map(operator.is_, left, self.grads)):
            for each in zip(self.params, self.locals, self.grads, left, self.at, strict=True):
                _take_back(*each)
        before = zip(self.params, self.grads, self.versions, versions, strict=True)
        return [p.index for p, grad, then, now in before if grad is not None or then != now]


def _take_back(
    p: ShardedParameter, local: torch.Tensor, grad: torch.Tensor | None, left: torch.Tensor | None, at: int
) -> None:
    """What a step did to the slice, which lay `at`, beside writing into it: `p.data = ...`, `p.grad = None`,
    `p.grad = ...`: `left`."""
    flat = p.flat
    if (local.data_ptr() != at or not at) and local.numel() and address_of(local) != address_of(flat.shard):
        with torch.no_grad():
            place = flat.local_of(flat.shard, p.index)
            local.data = place.copy_(local)
    if grad is None or left is grad:
        return
    if left is None:
        p.grad = None
    else:
        grad.copy_(left)
        flat.gradient_changed()
