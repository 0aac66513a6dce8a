"""Optimizer state: that of slices in a step, in the dtype of masters, and marked in state dicts."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from copy import deepcopy
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_map_only

from shardproof.errors import EngineError
from shardproof.zero.tensors.parameter import ShardedParameter, hand_over, in_the_model

# State of one number, whatever shape a parameter has.
SCALARS = "step", "mu_product", "eta", "mu"


class Replaced(nn.Parameter):
    """A parameter from before sharding that something held (a graph, a weak reference), so that the object itself could
    not be exchanged. Operations on it, through lists in user code, act on the parameter that took its place."""

    became: ShardedParameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map_only(Replaced, lambda p: p.became, (args, kwargs or {}))
        return func(*given[0], **given[1])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.became, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.became.__reduce_ex__(protocol)


def replace(p: nn.Parameter, made: ShardedParameter) -> None:
    """Have `made` stand in the place of `p`, and get what graphs of `p` have for it."""
    if p.requires_grad:
        p.register_post_accumulate_grad_hook(hand_over)
    p.__class__, p.__dict__["became"] = Replaced, made


def exchange_replaced(optimizer: Optimizer) -> None:
    """Give an optimizer that was made before sharding the parameters of the model now, with their state."""
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            if isinstance(p, Replaced):
                new = group["params"][i] = p.became
                if p in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(p)


def sharded_in(optimizer: Optimizer) -> list[ShardedParameter]:
    """In the order of the model: that of groups may differ between ranks, for example if they were made from sets."""
    found = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedParameter)]
    return sorted(found, key=in_the_model)


def cut(state: dict[str, Any], p: ShardedParameter) -> dict[str, Any]:
    """State of the whole parameter's shape (made before the first step, or loaded) becomes this rank's slice."""
    if not p.flat.engine.sharded:
        return state
    shape = p.flat.shapes[p.index]
    first, last = p.flat.range_in_parameter(p.index)
    if len(shape) == 1 and last - first == shape[0]:
        return state
    return {
        key: value.reshape(-1)[first:last].clone()
        if isinstance(value, torch.Tensor) and value.shape == shape and (shape or key not in SCALARS)
        else value
        for key, value in state.items()
    }


def in_master_dtype(p: ShardedParameter, state: dict[str, Any]) -> dict[str, Any]:
    """State that was made before the first step has the parameter's compute dtype: convert it to the master's."""
    low, master = p.dtype, p.flat.shard.dtype
    if low == master:
        return state
    return {k: v.to(master) if isinstance(v, torch.Tensor) and v.dtype == low else v for k, v in state.items()}


def beside(p: ShardedParameter, state: dict[str, Any]) -> dict[str, Any]:
    """State that was made before the first step, or loaded, lies on the computing device: move it home."""
    if p.flat.home is not None:
        state.update({key: value.to(p.flat.device) for key, value in state.items() if isinstance(value, torch.Tensor)})
    return state


_INSTEAD = (
    "Use shardproof.save(model, optimizer, folder) and shardproof.load, which fit any stage and number of ranks; or "
    "save optimizer.state_dict() on every rank, in a file of its own."
)
# In the groups of a state dict: of which slices its state is.
_SLICES_OF = "shardproof_slices_of"


def _slices_of(params: list[ShardedParameter]) -> str:
    engine = params[0].flat.engine
    return f"rank {engine.comm.shard_rank} of {engine.comm.shards}" if engine.sharded else "whole parameters"


def _asked_by_torchs_checkpoint() -> bool:
    """Whether `optimizer.state_dict()` was called by torch.distributed.checkpoint, rather than by the user."""
    frame: FrameType | None = sys._getframe(2)  # beyond this and the hook
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        if frame.f_globals["__name__"].startswith("torch.distributed.checkpoint."):
            return True
        frame = frame.f_back
    return False


def _pickled(which: weakref.ref[Optimizer]) -> Callable[[], Any]:
    """Replaces `__getstate__` of an optimizer for pickle, which would store whole parameters next to the state of this
    rank's slices. `copy.deepcopy` calls it, too, and is allowed to."""

    def get_state() -> Any:
        optimizer: Any = which()
        sharded = any(p.flat.engine.sharded for p in sharded_in(optimizer))
        if sharded and sys._getframe(1).f_globals.get("__name__") != "copy":
            raise EngineError(
                f"{type(optimizer).__name__} cannot be pickled: it holds the state of this rank's slices. {_INSTEAD}"
            )
        theirs: Any = type(optimizer)
        return theirs.__getstate__(optimizer)

    return get_state


def mark_state_dicts(optimizer: Optimizer) -> None:
    """Have `optimizer.state_dict()` say whose slices it holds, so that no other rank can mistake them for its own.

    torch.distributed.checkpoint asks for the state itself and assumes that it is the same on all ranks: it would keep
    the slices of one rank and lose the others. So it is refused there.
    """
    if optimizer.__dict__.get("_shardproof_marks"):
        return

    def mark(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        params = sharded_in(optimizer)
        if params and any(p.flat.engine.sharded for p in params):
            if _asked_by_torchs_checkpoint():
                raise EngineError(
                    "torch.distributed.checkpoint asks for the state of an optimizer that holds this rank's slices and "
                    f"would keep those of one rank only. {_INSTEAD}"
                )
            for group in state_dict["param_groups"]:
                group[_SLICES_OF] = _slices_of(params)

    optimizer.register_state_dict_post_hook(mark)
    optimizer.__dict__["__getstate__"] = _pickled(weakref.ref(optimizer))
    optimizer.__dict__["_shardproof_marks"] = True


def check_loaded(optimizer: Optimizer, params: list[ShardedParameter]) -> None:
    """Refuse state that was loaded from the slices of another rank, stage or number of ranks."""
    here = _slices_of(params)
    for group in optimizer.param_groups:
        there = group.pop(_SLICES_OF, here)
        if there != here:
            raise EngineError(
                f"The state that was loaded into {type(optimizer).__name__} belongs to the slices of {there}; "
                f"these are the slices of {here}. optimizer.state_dict() holds this rank's slices: save and load it on "
                "every rank, or use shardproof.save and shardproof.load, which fit any stage and number of ranks."
            )
