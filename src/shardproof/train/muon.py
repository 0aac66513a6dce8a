"""Muon for matrices, AdamW for the rest, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

FusedAdamW = partial(torch.optim.AdamW, fused=True)


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for groups of matrices, which are updated whole on the ranks that own them, and AdamW for those with
    `elementwise`, of which each rank updates its slices.

    A matrix moves by about as much as AdamW would move it (arXiv 2502.16982), so that both take one learning rate and
    one weight decay.

    Args:
        params: groups of parameters, each with `elementwise`, a bool.
        lr: of groups that have none of their own.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: of groups that have none of their own.
        adamw: what makes the optimizer of the elementwise groups.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adamw: Callable[..., torch.optim.Optimizer] = FusedAdamW,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "elementwise": False})
        whole, elementwise = self._of(False), self._of(True)
        # Each fills in what its groups lack, which are these groups.
        self._parts: dict[bool, torch.optim.Optimizer] = {}
        if whole:
            self._parts[False] = torch.optim.Muon(whole, adjust_lr_fn="match_rms_adamw")
        if elementwise:
            self._parts[True] = adamw(elementwise, betas=betas, eps=eps)

    def _of(self, elementwise: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["elementwise"] is elementwise]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for elementwise, part in self._parts.items():
            part.param_groups, part.state = self._of(elementwise), self.state  # loading puts others in their place
            part.step()
        return loss


def muon(params: Any, lr: float, model: nn.Module, **options: Any) -> MuonAndAdamW:
    """`MuonAndAdamW` of what a model trains.

    Args:
        params: groups of parameters.
        lr: of groups that have none of their own.
        model: whose parameters they are.
        options: others of `MuonAndAdamW`.
    """
    whole = {id(p) for p in matrices(model)}
    groups = []
    for group in params:
        for elementwise in (False, True):
            chosen = [p for p in group["params"] if (id(p) not in whole) is elementwise]
            if chosen:
                groups.append({**group, "params": chosen, "elementwise": elementwise})
    return MuonAndAdamW(groups, lr=lr, **options)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """What Muon is for: all of two dimensions but embeddings, heads onto the vocabulary, and single rows or columns."""
    models: list[Any] = [m for m in model.modules() if hasattr(m, "get_output_embeddings")]
    heads = [m.get_output_embeddings() for m in models]
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    apart = {id(p) for module in (*heads, *tables) if module is not None for p in module.parameters(recurse=False)}
    return [p for p in model.parameters() if p.dim() == 2 and min(p.shape) > 1 and id(p) not in apart]
