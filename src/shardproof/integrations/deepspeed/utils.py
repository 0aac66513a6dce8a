"""deepspeed.utils: whole values of one parameter, its gradient and its optimizer state; no-op markers."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import nn

from shardproof.errors import EngineError
from shardproof.zero.tensors.parameter import ShardedParameter

logger = logging.getLogger("shardproof")
OPTIMIZERS: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # the engines' optimizers, to look up state


def log_dist(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the given ranks, -1 for all; rank 0 by default."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if rank in (ranks or [0]) or -1 in (ranks or []):
        logger.log(level, "[rank %d] %s", rank, message)


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The whole master of a parameter. Every rank must call it."""
    if not isinstance(param, ShardedParameter):
        return param.detach().float().clone()
    flat = param.flat
    value = flat.engine.gradients.gather_slices(flat, param.index, param.local.detach())
    return value.view(flat.shapes[param.index]).float()


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The whole gradient of a parameter, or None. Every rank must call it, between backward and step."""
    grad = param.grad
    if grad is None:
        return None
    return grad.whole().detach() if isinstance(param, ShardedParameter) else grad.detach()  # type: ignore[attr-defined]


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Give a parameter a whole new gradient. Every rank must call it, between backward and step."""
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    with torch.no_grad():
        param.grad.copy_(value)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Give a parameter a whole new value. Every rank must call it."""
    with torch.no_grad():
        param.copy_(value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """The full optimizer state of a parameter under this name ("exp_avg"), or None before its first step. Every rank
    must call it."""
    value = _state(param).get(optim_state_key)
    if value is None or not (isinstance(param, ShardedParameter) and _is_slice(param, value)):
        return value if value is None else value.detach().clone()
    flat = param.flat
    whole = flat.engine.gradients.gather_slices(flat, param.index, value.detach().reshape(-1))
    return whole.view(flat.shapes[param.index])


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set the full optimizer state of a parameter. Every rank must call it.

    Raises:
        EngineError: the optimizer has no state under this name yet.
    """
    kept = _state(param).get(optim_state_key)
    if kept is None:
        raise EngineError(
            f"The optimizer has no {optim_state_key!r} for this parameter yet: state exists after the first step."
        )
    if isinstance(param, ShardedParameter) and _is_slice(param, kept):
        first, last = param.flat.range_in_parameter(param.index) if param.flat.engine.sharded else (0, None)
        value = value.reshape(-1)[first:last].view_as(kept)
    kept.copy_(value)


def _is_slice(param: ShardedParameter, value: torch.Tensor) -> bool:
    """Whether a state value is sharded like the parameter; a number, such as "step", is not."""
    return value.dim() > 0 and value.numel() == param.local.numel()


def _state(param: nn.Parameter) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = next((o.state[param] for o in OPTIMIZERS if param in o.state), {})
    return found


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Any) -> list[nn.Module]:
    """Nothing to do: experts and towers that only some ranks use need no mark. Returns the modules named."""
    kinds = tuple(kind for kind in leaf_module_classes if isinstance(kind, type))
    names = {str(kind) for kind in leaf_module_classes}
    return [m for m in model.modules() if isinstance(m, kinds) or type(m).__name__ in names]


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Any) -> list[nn.Module]:
    """Nothing to do."""
    return set_z3_leaf_modules(model, leaf_module_classes)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Nothing to do."""


class RepeatingLoader:
    """A loader that starts over at its end."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._rest = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._rest)
        except StopIteration:
            self._rest = iter(self.loader)
            return next(self._rest)
