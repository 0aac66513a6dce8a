"""Checks before a model is touched: by `shard`, of models in which ranks would differ, nothing would be trained or work
would be done twice; and by functions that need a sharded model."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardproof.errors import EngineError
from shardproof.zero.precision import MixedPrecision
from shardproof.zero.ranks.invariants import some
from shardproof.zero.tensors.parameter import ShardedParameter

if TYPE_CHECKING:
    from shardproof.zero.schedule.engine import Engine

log = logging.getLogger("shardproof.zero")

_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
# By name, as importing them takes half a second.
_WRAPPERS = {
    "DDP",  # what `replicate` mixes into a module's class
    "DataParallel",
    "DistributedDataParallel",
    "FSDPModule",
    "FullyShardedDataParallel",
    "ReplicateModule",
}

# A parameter may have an attribute of this name: a function of the first and the last (exclusive) element, which reads
# these from where the values are. Then its own are not looked at, and no rank ever has more than it keeps.
READER = "read_range"


def check_unwrapped(model: nn.Module) -> None:
    """Refuse wrappers that average gradients, shard parameters or split batches themselves."""
    for name, module in model.named_modules():
        if _WRAPPERS & {cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("torch.")}:
            where = f"'{name}'" if name else "The model"
            raise EngineError(
                f"{where} is wrapped in {type(module).__name__}, which does what shardproof.shard does. Leave the "
                "wrapper out: shard the module itself, stage 0 is what DistributedDataParallel does."
            )


def check_steps(model: nn.Module) -> None:
    """Refuse optimizers that step in backward where gradients of plain parameters are accumulated."""
    for name, p in model.named_parameters():
        if "_in_backward_optimizers" in p.__dict__:
            raise EngineError(
                f"'{name}' has an optimizer from _apply_optimizer_in_backward, which would never step: it waits for "
                "the gradient accumulator of a plain parameter. Step in a hook registered after shardproof.shard "
                "instead: "
                "p.register_post_accumulate_grad_hook."
            )


def check_forwards(model: nn.Module, ranks: int) -> None:
    """Refuse modules whose forward changes weights depending on one rank's data."""
    for name, module in model.named_modules():
        if ranks > 1 and isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise EngineError(
                f"'{name}' rescales its weight in each forward (max_norm={module.max_norm}), every rank by its own "
                "tokens, so ranks would differ. Set max_norm=None and clip the rows after the step."
            )


def warn_of_statistics(model: nn.Module, precision: MixedPrecision | None) -> None:
    """Warn of what torch will not compute: it normalizes in the dtype of the running statistics, and buffers keep
    theirs."""
    if precision is None:
        return
    other = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BATCH_NORMS) and module.affine and module.running_mean is not None
        if module.running_mean.dtype != precision.compute
    ]
    if other:
        log.warning(
            "%s: a BatchNorm whose running statistics are not %s, the dtype its weights are gathered in; torch "
            "normalizes in one dtype only. Convert it before shardproof.shard (module.to(%s)): masters stay float32.",
            *(some(other), precision.compute, precision.compute),
        )


def check_codes(model: nn.Module, precision: MixedPrecision | None) -> None:
    """Refuse mixed precision of weights in FP8: their layers multiply them by scales, unless they are wider."""
    if precision is None:
        return
    for name, p in model.named_parameters():
        if p.is_floating_point() and p.element_size() == 1 and READER not in p.__dict__:
            raise EngineError(
                f"'{name}' is {p.dtype}: it holds codes that its layer multiplies by scales, and mixed precision would "
                f"turn them into {precision.compute} weights. Load the model unpacked (shardproof.load_pretrained does"
                " that), or leave mixed_precision out."
            )


def check_and_move(model: nn.Module, device: torch.device) -> None:
    """Refuse tensors without values, move buffers to `device`, and log in one line which were elsewhere.

    Parameters are moved unit by unit while they are cut.
    """
    places: dict[str, list[str]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, ShardedParameter):
            raise EngineError(
                f"'{name}' is sharded already, in a {type(tensor.flat.engine.model).__name__}. Call shardproof.shard "
                "once, on the outermost model that trains; models that share parameters are sharded as one: put them "
                "into a torch.nn.ModuleList, and shard that. A sharded model that gets adapters later, or whose "
                "adapters are merged, trains on without a second call; for another Trainer, save it and load that."
            )
        if READER in tensor.__dict__:
            continue
        if tensor.is_meta and device.type != "meta":
            raise EngineError(
                f"'{name}' is on the meta device: it has a shape but no values. Load or initialise it before "
                "shardproof.shard (for example model.to_empty(device='cpu') and its initialisation)."
            )
        if tensor.requires_grad and tensor.is_leaf and not isinstance(tensor, nn.Parameter):
            raise EngineError(
                f"The buffer '{name}' requires a gradient, which would not be averaged over ranks: each rank has "
                "its own buffers. Make it an nn.Parameter if it is trained, else call requires_grad_(False) on it."
            )
        places.setdefault(str(tensor.device), []).append(name)
    strays = {d: names for d, names in places.items() if torch.device(d) != device}
    if strays:
        text = "; ".join(f"{_abridged(names)} from {d}" for d, names in strays.items())
        # A whole model that comes from the CPU is the ordinary case; parts that lie elsewhere are news.
        level = logging.WARNING if len(places) > 1 else logging.INFO
        log.log(level, "moved to %s: %s", device, text)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[key] = buffer.to(device)


def _abridged(names: list[str]) -> str:
    top = Counter(n.split(".")[0] for n in names)
    if len(names) <= 3:
        return ", ".join(names)
    return f"{len(names)} tensors ({', '.join(f'{k}.*' if c > 1 else k for k, c in top.most_common(4))})"


def check_memory(model: nn.Module) -> None:
    """Refuse two tensors in the same memory if one is trained: once sharded, each has memory of its own.

    Only contiguous tensors are checked. Interleaved views (columns of one matrix) share nothing.
    """
    spans: list[tuple[int, int, int, str, bool]] = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta or type(tensor) not in (nn.Parameter, torch.Tensor) or READER in tensor.__dict__:
            continue
        if tensor.layout is torch.strided and tensor.numel() and tensor.is_contiguous():
            storage, start = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
            spans.append((storage, start, start + tensor.nbytes, name, tensor.requires_grad))
    near: list[tuple[int, int, int, str, bool]] = []  # those that reach to where the next one begins, or further
    for span in sorted(spans):
        near = [one for one in near if one[0] == span[0] and one[2] > span[1]]
        for one in near:
            if not (one[4] or span[4]):
                continue
            raise EngineError(
                f"'{one[3]}' and '{span[3]}' share memory without being one parameter, and would each have their own "
                "once they are sharded. If they are meant to be tied, make them one object before shardproof.shard "
                "(`module.weight = other.weight`); if not, give one a copy: `p.data = p.data.clone()`."
            )
        near.append(span)


def has_engine(model: nn.Module) -> bool:
    """Whether `shard` was called on this very model, and not, for example, on one it was copied from inside `whole`."""
    return model.__dict__.get("_shardproof") is not None


def engine_of(model: nn.Module) -> Engine:
    """The engine of a model that is sharded.

    Raises:
        EngineError: it is not; if something around it or in it is, that is named.
    """
    inner = getattr(model, "_orig_mod", model)  # of what torch.compile(model) returns
    engine = inner.__dict__.get("_shardproof")
    if engine is None:
        raise EngineError(_why_not_sharded(model))
    return engine


def _why_not_sharded(model: nn.Module) -> str:
    kind = type(model).__name__
    within = [name for name, module in model.named_modules() if has_engine(module)]
    if within:
        return (
            f"This {kind} is not sharded, but its '{within[0]}' is: pass that one, or call shardproof.shard once, on "
            f"the {kind}."
        )
    held = next((p for p in model.parameters() if isinstance(p, ShardedParameter)), None)
    if held is not None:
        return f"This {kind} is a part of a sharded {type(held.flat.engine.model).__name__}: pass that one."
    return f"This {kind} is not sharded. Call shardproof.shard(model, stage=...) first."
