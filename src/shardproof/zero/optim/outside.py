"""Parameters that an optimizer trains beside sharded ones, and that nothing averages over ranks.

The head of a loss, learned weights of losses: if they are not part of a sharded model, each rank has the gradient of
its own rows, and trains its own copy. Clipping then uses another factor on each rank, for the sharded parameters too.
So before the first steps of an optimizer the ranks compare such values and gradients: values that were the same, and
differ after a step with different gradients, have parted. Code that averages gradients, or values after each step,
keeps them the same.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardproof.errors import DesyncError
from shardproof.zero.ranks.invariants import differing, digest, some

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

    from shardproof.zero.schedule.engine import Engine

log = logging.getLogger("shardproof.zero")

_APART = 1e-3  # of its norm: as far gradients may be that are the same but for rounding
_AT_ONCE = 2**20  # elements


class Outside:
    """The parameters of one optimizer that are not sharded, over its first steps.

    Attributes:
        now: for each, on this rank: its name, the digest of its values, and where its gradient lies.
        alike: for each, whether all ranks had the same values before the last step; `apart`: different gradients. Empty
            if ranks have different numbers of them.
    """

    def __init__(self) -> None:
        self.now: list[tuple[str, int, tuple[float, float]]] = []
        self.alike: list[bool] = []
        self.apart: list[bool] = []

    def before_first(self, engine: Engine, optimizer: Optimizer) -> None:
        """Before the first step, where only some ranks may have any: no communication."""
        if engine.comm.real:
            self._look(optimizer)

    def after_first(self, engine: Engine) -> None:
        """After the first step, where all ranks have just met: a rank that has none takes part, too."""
        if not engine.comm.real:
            return
        if differing(engine.comm, [len(self.now)]) or not self.now:
            return
        self._exchange(engine)
        own = [name for i, (name, _, _) in enumerate(self.now) if self.apart[i] and not self.alike[i]]
        if own and engine.comm.rank == 0:
            log.warning(
                "%s: not sharded, and each rank trains values of its own with gradients of its own. Where they should "
                "be the same, make them a part of the module that shardproof.shard is given.",
                some(own),
            )

    def before_next(self, engine: Engine, optimizer: Optimizer) -> None:
        """Before the second step and the third.

        Raises:
            DesyncError: copies of a parameter have parted.
        """
        if not self.alike:
            return
        self._look(optimizer)
        if len(self.now) != len(self.alike):  # a group was added
            return
        engine.meet("check the first update")
        before, apart = self.alike, self.apart
        self._exchange(engine)
        found = zip(self.now, before, self.alike, apart, self.apart, strict=True)
        parted = [now[0] for now, was_alike, alike, *gradients in found if was_alike and not alike and any(gradients)]
        if parted:
            raise DesyncError(
                f"{some(parted)}: trained by {type(optimizer).__name__} beside a sharded model, with gradients of each "
                "rank's own rows, so that each rank trains a copy of its own. Make them a part of the module that "
                "shardproof.shard is given, or call shardproof.shard on their module as well, or average their "
                "gradients before the step (torch.distributed.all_reduce). What each rank shall train for itself, give "
                "to an optimizer of its own."
            )

    def _look(self, optimizer: Optimizer) -> None:
        with torch.no_grad():
            self.now = [(name, digest(p), _place(p.grad)) for name, p in _plain(optimizer)]

    def _exchange(self, engine: Engine) -> None:
        places = torch.tensor([place for _, _, place in self.now]).T
        ends = torch.stack([places, -places]).to(engine.comm.device)
        self.alike = engine.comm.agree([number for _, number, _ in self.now])
        (highest, norms), (lowest, _) = engine.comm.largest(ends).tolist()
        self.apart = [high + low > _APART * norm for high, low, norm in zip(highest, lowest, norms, strict=True)]


def _plain(optimizer: Optimizer) -> list[tuple[str, torch.Tensor]]:
    """What is no subclass (a DTensor knows its ranks) and has values, by its name, or by its place in the optimizer."""
    found = []
    slices = {id(local) for _, local in optimizer.__dict__["_shardproof_swap"].pairs}
    for number, group in enumerate(optimizer.param_groups):
        names: Any = group.get("param_names")
        for i, p in enumerate(group["params"]):
            known = id(p) in slices or type(p) not in (nn.Parameter, torch.Tensor)
            if not known and p.is_floating_point() and not p.is_meta:
                name = names[i] if names else f"param_groups[{number}]['params'][{i}] of shape {tuple(p.shape)}"
                found.append((name, p))
    return found


def _place(grad: torch.Tensor | None) -> tuple[float, float]:
    """Where a gradient lies along a line that is the same on all ranks, and its norm; a piece at a time."""
    if grad is None:
        return 0.0, 0.0
    along, squares = 0.0, 0.0
    for number, piece in enumerate((grad.to_dense() if grad.is_sparse else grad).detach().reshape(-1).split(_AT_ONCE)):
        first = number * _AT_ONCE + 1
        signs = (torch.arange(first, first + piece.numel(), device=piece.device) * 0x9E3779B1 >> 31 & 1) * 2 - 1
        values = piece.float()
        along += float(values @ signs.float())
        squares += float(values @ values)
    return along, squares**0.5
