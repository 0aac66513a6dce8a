"""What an optimizer trains beside sharded parameters, and nobody averages over ranks.

The head of a loss, learnt weights of losses: if they are no part of a sharded model, each rank has the gradient of its
own rows, and trains a copy of its own. Clipping then gives each rank another factor, for the sharded parameters too.
In the first steps of an optimizer the ranks therefore compare such gradients. Who averages them, or has the same rows
on all ranks, has the same ones, up to the order of additions.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardproof.errors import DesyncError
from shardproof.zero.invariants import differing, digest, some

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

    from shardproof.zero.schedule import Engine

log = logging.getLogger("shardproof")

_APART = 1e-3  # of its norm: as far gradients may be that are the same but for rounding


def compare_outside(engine: Engine, optimizer: Optimizer) -> None:
    """Before one of the first steps of an optimizer that has parameters of `engine`, on all ranks alike.

    Raises:
        DesyncError: parameters that are not sharded have the same values on all ranks and other gradients.
    """
    plain = _plain(optimizer)
    if not plain or not engine.written.compares:
        return
    with engine.unseen(), torch.no_grad():
        engine.meet("check the first update")
        if differing(engine.comm, [len(plain)]):
            raise DesyncError(
                f"{type(optimizer).__name__} has {len(plain)} parameters on rank {engine.comm.rank} that are not "
                "sharded, and another number elsewhere. Give it the same parameters on all ranks."
            )
        places = torch.tensor([_place(p.grad) for _, p in plain]).T
        ends = torch.stack([places, -places]).to(engine.comm.device)
        (highest, norms), (lowest, _) = engine.comm.largest(ends).tolist()
        own = differing(engine.comm, [digest(p) for _, p in plain])
    wrong = [
        i for i, (high, low, norm) in enumerate(zip(highest, lowest, norms, strict=True)) if high + low > _APART * norm
    ]
    if not wrong:
        return
    alike = [plain[i][0] for i in wrong if i not in own]
    if alike:
        raise DesyncError(
            f"{some(alike)}: trained by {type(optimizer).__name__} beside a sharded model, with gradients of each "
            "rank's own rows, so that each rank would train a copy of its own. Make them a part of the module that "
            "shardproof.shard is given, or call shardproof.shard on their module as well, or average their gradients "
            "before the step (torch.distributed.all_reduce). What each rank shall train for itself, give to an "
            "optimizer of its own."
        )
    if engine.comm.rank == 0 and not optimizer.__dict__.get("_shardproof_told_own"):
        optimizer.__dict__["_shardproof_told_own"] = True
        log.warning(
            "%s: not sharded, and each rank trains values of its own with gradients of its own. Where they should be "
            "the same, make them a part of the module that shardproof.shard is given.",
            some([plain[i][0] for i in wrong]),
        )


def _plain(optimizer: Optimizer) -> list[tuple[str, torch.Tensor]]:
    """What is no subclass (a DTensor knows its ranks), by its name, or by where it stands in the optimizer."""
    found = []
    slices = {id(local) for _, local in optimizer.__dict__["_shardproof_swap"].pairs}
    for number, group in enumerate(optimizer.param_groups):
        names: Any = group.get("param_names")
        for i, p in enumerate(group["params"]):
            if id(p) not in slices and type(p) in (nn.Parameter, torch.Tensor) and p.is_floating_point():
                name = names[i] if names else f"param_groups[{number}]['params'][{i}] of shape {tuple(p.shape)}"
                found.append((name, p))
    return found


def _place(grad: torch.Tensor | None) -> tuple[float, float]:
    """Along a line that is the same on all ranks; and the norm."""
    if grad is None:
        return 0.0, 0.0
    values = (grad.to_dense() if grad.is_sparse else grad).detach().reshape(-1).float()
    signs = (torch.arange(1, values.numel() + 1, device=values.device) * 0x9E3779B1 >> 31 & 1) * 2 - 1
    return float(values @ signs.float()), float(values.norm())
