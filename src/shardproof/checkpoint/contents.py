"""The parts of a model and of its optimizer, and how they take loaded values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardproof.checkpoint.manifest import Manifest, Tensor
from shardproof.checkpoint.parts import Part
from shardproof.checkpoint.storage import dtype_name
from shardproof.errors import CheckpointError
from shardproof.zero.optim.state import SCALARS
from shardproof.zero.optim.step import owned_here, unwrapped, updated_whole, with_modes
from shardproof.zero.state import with_extra_state
from shardproof.zero.tensors.parameter import ShardedParameter

if TYPE_CHECKING:
    from shardproof.zero.schedule.engine import Engine

MODEL, STATE = "model.", "optimizer.state."
BLOCKS = ("absmax", "qmap")  # state that bitsandbytes keeps per block of a slice


@dataclass
class ModelParts:
    """The parts of a model that this rank holds.

    Attributes:
        frozen: names of the parts that are not trained.
        buffers: the unsharded tensor behind a part, by its name, where nothing is sharded.
        aliases: other names of tied parameters; checkpoints of other engines may hold these as well.
        extra: the modules with extra state, by the name of that entry in a state dict.
    """

    parts: list[Part]
    params: dict[str, ShardedParameter]
    frozen: set[str]
    buffers: dict[str, torch.Tensor]
    aliases: set[str] = field(default_factory=set)
    extra: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, list[int]]:
        return {part.name: list(part.shape) for part in self.parts}


def _part(name: str, p: ShardedParameter, local: torch.Tensor) -> Part:
    """`local`, 1-D, has one element for each element of this rank's slice of `p`."""
    return _held(name, p, tuple(p.shape), p.flat.range_in_parameter(p.index)[0], local)


def _whole_part(name: str, p: ShardedParameter, value: torch.Tensor) -> Part:
    """`value` is unsharded state of `p` with its own shape."""
    return _held(name, p, tuple(value.shape), 0, value.reshape(-1))


def _held(name: str, p: ShardedParameter, shape: tuple[int, ...], first: int, local: torch.Tensor) -> Part:
    """A part held by the same ranks as this rank's slice of `p`."""
    comm, sharded = p.flat.engine.comm, p.flat.engine.sharded
    copies = (comm.replicas, comm.replica) if sharded else (1, 0)
    return Part(name, shape, first, local, not sharded, *copies)


def model_parts(engine: Engine) -> ModelParts:
    """Masters and persistent buffers. A tied parameter appears under its first name only; parameters that are never
    sharded (packed formats) are left out."""
    if any(unit.depth for unit in engine.units) or engine.whole_depth:
        raise CheckpointError("A checkpoint cannot be saved or loaded inside a forward pass or shardproof.whole().")
    found = ModelParts([], {}, set(), {})
    for flat in engine.flats:
        flat.before_change()  # loading writes into these slices
    for name, p in engine.model.named_parameters():
        if not isinstance(p, ShardedParameter):
            continue
        found.parts.append(_part(MODEL + name, p, p.flat.locals[p.index].view(-1)))
        found.params[name] = p
        if not p.flat.requires_grad[p.index]:
            found.frozen.add(MODEL + name)
    found.aliases = {MODEL + name for name, _ in engine.model.named_parameters(remove_duplicate=False)}
    found.extra = with_extra_state(engine.model)
    for name, value in engine.model.state_dict(keep_vars=True).items():
        if name in found.extra or name in found.params or isinstance(value, nn.Parameter):
            continue
        if isinstance(value, torch.Tensor):
            found.buffers[MODEL + name] = value
            here = value.detach().reshape(-1)
            found.parts.append(Part(MODEL + name, tuple(value.shape), 0, here, True, of_first=True))
    return found


def plain_parts(model: nn.Module) -> ModelParts:
    """The same for a model that is not sharded."""
    params = dict(model.named_parameters())  # tied ones only once
    known = {id(p) for p in params.values()}
    extra = with_extra_state(model)
    entries = {n: v for n, v in model.state_dict(keep_vars=True).items() if n not in extra}
    buffers = {n: v for n, v in entries.items() if isinstance(v, torch.Tensor) and id(v) not in known}
    tensors = {MODEL + name: value for name, value in {**params, **buffers}.items()}
    parts = [Part(name, tuple(v.shape), 0, v.detach().reshape(-1), True) for name, v in tensors.items()]
    return ModelParts(
        parts, {}, {MODEL + name for name, p in params.items() if not p.requires_grad}, tensors, extra=extra
    )


def adopt_model(model: ModelParts) -> None:
    """The parts have new values."""
    for p in model.params.values():
        p.value_changed()
    for part in model.parts:
        buffer = model.buffers.get(part.name)
        if buffer is not None and buffer.data_ptr() != part.local.data_ptr():  # it is not contiguous
            with torch.no_grad():
                buffer.copy_(part.local.view(buffer.shape))


def compare(model: ModelParts, manifest: Manifest, folder: Any) -> None:
    """Raise CheckpointError, naming the first five differences, if the checkpoint belongs to another model."""
    saved = {name: tensor.shape for name, tensor in manifest.tensors.items() if name.startswith(MODEL)}
    saved |= manifest.left_out
    here = model.shapes
    if manifest.frozen_unknown:
        saved |= {name: here[name] for name in model.frozen if name not in saved}

    def alike(name: str) -> bool:
        """A frozen base may be packed in 4 bits in the checkpoint but not in the model, or vice versa."""
        shapes = list(saved[name]), list(here[name])
        packed = name in manifest.left_out and any(
            one == [-(-torch.Size(other).numel() // 2), 1] for one, other in (shapes, shapes[::-1])
        )
        return shapes[0] == shapes[1] or packed

    lines = []
    for what, names in (
        ("missing in it", [name for name in here if name not in saved]),
        ("not in this model", [name for name in saved if name not in here and name not in model.aliases]),
        (
            "of another shape",
            [f"{n} {saved[n]} instead of {here[n]}" for n in here if n in saved and not alike(n)],
        ),
        ("left out of it, but trained here", [n for n in here if n in manifest.left_out and n not in model.frozen]),
    ):
        if names:
            shown = ", ".join(name.removeprefix(MODEL) for name in names[:5])
            lines.append(f"{len(names)} {what}: {shown}{' ...' if len(names) > 5 else ''}")
    if lines:
        raise CheckpointError(f"{folder} is a checkpoint of another model. {'; '.join(lines)}.")


# --- the optimizer ----------------------------------------------------------------------------------


@dataclass
class OptimizerParts:
    """The parts of an optimizer's state that this rank holds.

    Attributes:
        parts: state with one element per element of the parameter.
        shared: class, groups and scalar state, which are the same on every rank.
        local: tensors of other shapes (blocks of quantised state), which belong to exactly this range of the parameter.

    If an optimizer updates whole parameters, its state of any shape is a part with that shape, on the rank that owns
    the parameter.
    """

    parts: list[Part]
    shared: dict[str, Any]
    local: dict[str, dict[str, Any]] = field(default_factory=dict)


def optimizer_parts(optimizer: Optimizer, model: ModelParts) -> OptimizerParts:
    """Raises CheckpointError if the optimizer has parameters that are not the model's."""
    kind = type(unwrapped(optimizer)).__name__
    found = OptimizerParts([], {"class": kind, "groups": _groups(optimizer, model), "scalars": {}})
    whole, owned = updated_whole(optimizer), owned_here(optimizer)
    for name, p in model.params.items():
        if owned is not None and id(p) not in owned:
            continue
        first, last = p.flat.range_in_parameter(p.index)
        for key, value in optimizer.state.get(p, {}).items():
            if not isinstance(value, torch.Tensor) or (value.dim() == 0 and (p.dim() or key in SCALARS)):
                found.shared["scalars"].setdefault(name, {})[key] = value
            elif id(p) in whole:
                found.parts.append(_whole_part(f"{STATE}{name}.{key}", p, value.detach()))
            elif key.startswith(BLOCKS):  # whatever its shape
                found.local.setdefault(name, {"range": [first, last]})[key] = value
            elif value.shape == p.shape:  # nothing is sharded, or no step has sharded it yet
                local = value.detach().reshape(-1)[first:last]
                found.parts.append(_part(f"{STATE}{name}.{key}", p, local))
            elif value.shape == (last - first,):
                found.parts.append(_part(f"{STATE}{name}.{key}", p, value.detach()))
            else:
                found.local.setdefault(name, {"range": [first, last]})[key] = value
    return found


def owned_state(optimizer: Optimizer, model: ModelParts) -> dict[str, Any]:
    """For an optimizer that updates whole parameters, what only this rank knows: names, shapes and dtypes of the parts
    it owns, and the state that is not a tensor."""
    own = optimizer_parts(optimizer, model)
    tensors = {part.name: (list(part.shape), dtype_name(part.local.dtype)) for part in own.parts}
    return {"tensors": tensors, "scalars": own.shared["scalars"]}


def _groups(optimizer: Optimizer, model: ModelParts) -> list[dict[str, Any]]:
    names = {id(p): name for name, p in model.params.items()}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        strangers = [p for p in group["params"] if id(p) not in names]
        if strangers:
            raise CheckpointError(
                f"Group {number} of {type(optimizer).__name__} holds {len(strangers)} parameters that do not belong to "
                f"this model (the first has shape {tuple(strangers[0].shape)}). Save each model with its own optimizer."
            )
        groups.append({**group, "params": [names[id(p)] for p in group["params"]]})
    return groups


def prepare_optimizer(
    optimizer: Optimizer, model: ModelParts, shared: dict[str, Any], manifest: Manifest, folder: Any
) -> tuple[dict[str, dict[str, torch.Tensor]], list[Part]]:
    """Empty state tensors shaped as in the checkpoint, and the parts that fill them.

    Raises:
        CheckpointError: the optimizer has another class or other groups than the saved one.
    """
    _check_class(optimizer, shared, folder)
    here = _groups(optimizer, model)
    if len(here) != len(shared["groups"]):
        raise CheckpointError(
            f"The optimizer in {folder} has {len(shared['groups'])} parameter groups; this one has {len(here)}."
        )
    for number, (mine, saved) in enumerate(zip(here, shared["groups"], strict=True)):
        odd = sorted(set(mine["params"]) ^ set(saved["params"]))
        if odd:
            raise CheckpointError(
                f"Group {number} of the optimizer holds other parameters than in {folder}. {len(odd)} differ: "
                f"{', '.join(odd[:5])}{' ...' if len(odd) > 5 else ''}."
            )
    state: dict[str, dict[str, torch.Tensor]] = {}
    parts = []
    whole, owned = updated_whole(optimizer), owned_here(optimizer)
    trained = {name for group in here for name in group["params"]}
    for full_name, tensor in manifest.tensors.items():
        name, _, key = full_name.removeprefix(STATE).rpartition(".")
        if not full_name.startswith(STATE) or name not in trained:
            continue
        p = model.params[name]
        dtype = _dtype_of_state(tensor.dtype, manifest.tensors.get(MODEL + name), p)
        if id(p) in whole:
            if owned is None or id(p) in owned:
                value = state.setdefault(name, {})[key] = torch.empty(tensor.shape, dtype=dtype, device=p.flat.device)
                parts.append(_whole_part(full_name, p, value))
            continue
        first, last = p.flat.range_in_parameter(p.index)
        local = torch.empty(last - first, dtype=dtype, device=p.flat.device)
        parts.append(_part(full_name, p, local))
        state.setdefault(name, {})[key] = local if p.flat.engine.sharded else local.view(p.shape)
    return state, parts


def _dtype_of_state(saved: str, weights: Tensor | None, p: ShardedParameter) -> torch.dtype:
    """State saved in its parameter's dtype gets the parameter's present dtype: masters may be fp32 now."""
    here = p.flat.locals[p.index].dtype
    followed = weights is not None and weights.dtype == saved
    return here if followed and here.is_floating_point else getattr(torch, saved)


def _check_class(optimizer: Optimizer, shared: dict[str, Any], folder: Any) -> None:
    """Raise CheckpointError for another class, which would misread the saved state or silently start without it.

    Converted checkpoints name no class, but their groups either have Adam's `betas` or not.
    """
    own = unwrapped(optimizer)
    here, there = type(own).__name__, shared.get("class")
    alike = all(("betas" in group) == ("betas" in own.defaults) for group in shared["groups"])
    if here != there if there else not alike:
        raise CheckpointError(
            f"The optimizer in {folder} is {there or 'of another class'}, and this one is {here}, which keeps "
            f"different state. Continue with {there or 'the saved class'}, or load only the weights and let {here} "
            "start afresh: shardproof.load(model, None, path)."
        )
    if "bias_correction" not in own.defaults and any(not g.get("bias_correction", True) for g in shared["groups"]):
        raise CheckpointError(
            f"The optimizer in {folder} steps without Adam's bias correction (DeepSpeed's bias_correction=False), "
            f"and {here} always corrects. Load only the weights and let {here} start afresh: "
            "shardproof.load(model, None, path)."
        )


def take_local_state(
    local: dict[str, dict[str, Any]], model: ModelParts, state: dict[str, dict[str, Any]], folder: Any
) -> None:
    """Add state whose shape differs from its parameter's to `state`.

    Raises:
        CheckpointError: it belongs to other slices than the present ones.
    """
    for name, values in local.items():
        p = model.params[name]
        first, last = values.pop("range")
        if (first, last) != p.flat.range_in_parameter(p.index):
            raise _cut(folder, name, list(values))
        on_device = {k: v.to(p.flat.device) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        state.setdefault(name, {}).update(on_device)
    for name, found in state.items():
        in_blocks = [k for k, v in found.items() if getattr(v, "dtype", None) is torch.uint8 and v.numel()]
        if in_blocks and not any(key.startswith(BLOCKS) for key in found):  # another rank had them
            raise _cut(folder, name, in_blocks)


def _cut(folder: Any, name: str, keys: list[str]) -> CheckpointError:
    return CheckpointError(
        f"The optimizer in {folder} keeps state of '{name}' that cannot be resharded ({', '.join(keys)}). "
        "Load it at the stage and on the number of ranks that saved it."
    )


def adopt_optimizer(
    optimizer: Optimizer, model: ModelParts, state: dict[str, dict[str, Any]], shared: dict[str, Any]
) -> None:
    """Load groups and state into the optimizer."""
    owned = owned_here(optimizer)
    for group, saved in zip(optimizer.param_groups, shared["groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
        for name in saved["params"]:
            p = model.params[name]
            scalars = {key: _placed(key, value, group, p) for key, value in shared["scalars"].get(name, {}).items()}
            own = {**scalars, **state.get(name, {})}
            if own and (owned is None or id(p) in owned):
                optimizer.state[p] = own
            else:
                optimizer.state.pop(p, None)
    _as_its_class_wants(unwrapped(optimizer))
    with_modes(optimizer)


def _as_its_class_wants(optimizer: Optimizer) -> None:
    """The last part of `load_state_dict`: torch's classes turn the number of steps into a tensor (DeepSpeed's Adam
    counts in an int), and add keys that groups lack."""
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def _placed(key: str, value: Any, group: dict[str, Any], p: ShardedParameter) -> Any:
    """As in torch's `load_state_dict`: the number of steps is on the CPU unless a kernel updates it."""
    if not isinstance(value, torch.Tensor) or (key == "step" and not (group.get("capturable") or group.get("fused"))):
        return value
    return value.to(p.flat.device)
