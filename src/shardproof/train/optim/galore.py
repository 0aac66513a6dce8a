"""AdamW on gradients projected onto a few of their directions (GaLore)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class GaLore(torch.optim.Optimizer):
    """AdamW that keeps the state of a matrix for `rank` directions of its shorter side (arXiv 2403.03507): those in
    which the gradient is largest, recomputed every `update_gap` steps. AdamW's update is projected back, times `scale`.

    Its state for a matrix [m, n], m >= n, is two values for each of m * rank elements, and n * rank values for the
    directions, in the dtype of the gradient. Results match the authors' galore-torch (`proj_type="std"`), except that
    weight decay is applied before the update, as in torch's AdamW.

    Args:
        params: matrices, or groups of them.
        lr: for groups without one of their own.
        betas: for AdamW.
        eps: for AdamW.
        weight_decay: for AdamW.
        rank: directions to keep, at least 1; a matrix that has fewer keeps all of them.
        update_gap: steps after which they are recomputed, at least 1.
        scale: factor for the update, above 0.

    Raises:
        ValueError: a number is out of range, or a parameter is not a matrix.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        rank: int = 128,
        update_gap: int = 50,
        scale: float = 1.0,
    ) -> None:
        own = {"rank": rank, "update_gap": update_gap, "scale": scale}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **own})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        own = {**self.defaults, **param_group}
        if own["rank"] < 1 or own["update_gap"] < 1 or own["scale"] <= 0:
            raise ValueError("GaLore: rank and update_gap must be at least 1, and scale above 0.")
        super().add_param_group(param_group)
        odd = [tuple(p.shape) for p in self.param_groups[-1]["params"] if p.dim() != 2]
        if odd:
            raise ValueError(f"GaLore projects matrices, but a parameter has shape {odd[0]}.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        wide = p.shape[0] < p.shape[1]
        gradient = p.grad.mT if wide else p.grad  # type: ignore[union-attr]  # [longer side, shorter side]
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0, device="cpu")
        if int(state["step"]) % group["update_gap"] == 0:
            state["directions"] = _directions(p.grad, group["rank"])  # type: ignore[arg-type]
        few = gradient @ state["directions"].mT
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(few), torch.zeros_like(few)
        state["step"] += 1
        step, (beta1, beta2) = int(state["step"]), group["betas"]
        mean = state["exp_avg"].lerp_(few, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(few, few, value=1 - beta2)
        root = square.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        update = (mean / root) @ state["directions"]
        lr = float(group["lr"])
        p.mul_(1 - lr * group["weight_decay"])
        p.add_(update.mT if wide else update, alpha=-lr * group["scale"] / (1 - beta1**step))


def _directions(gradient: torch.Tensor, rank: int) -> torch.Tensor:
    """The largest singular vectors on the shorter side of a matrix, in its dtype: [rank, shorter side]."""
    left, _, right = torch.linalg.svd(gradient.float(), full_matrices=False)
    found = left[:, :rank].mT if gradient.shape[0] < gradient.shape[1] else right[:rank]
    return found.to(gradient.dtype, copy=True, memory_format=torch.contiguous_format)  # a copy, to free the rest
