"""Whole values in and out: the `whole` context and full state dicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from shardproof.errors import EngineError
from shardproof.zero.ranks.invariants import differing, digest, on_any_rank, some
from shardproof.zero.schedule.engine import Engine
from shardproof.zero.tensors.parameter import ShardedParameter
from shardproof.zero.units.flat import Flat

_EXTRA = "_extra_state"  # torch's name

StandIns = dict[ShardedParameter, nn.Parameter]  # what is whole in its place


# --- whole() --------------------------------------------------------------------------------------


def enter_whole(engine: Engine) -> StandIns:
    """Put an ordinary parameter in every slot."""
    if any(unit.depth for unit in engine.units):
        raise EngineError("shardproof.whole(model) cannot begin inside a forward pass of the model.")
    if engine.whole_depth:
        raise EngineError("shardproof.whole(model) is active already.")
    engine.adopt()
    engine.gradients.finish()
    engine.meet("enter shardproof.whole")
    engine.whole_depth += 1
    stand_ins: StandIns = {}
    with torch.inference_mode(False), torch.no_grad():
        for flat in engine.flats:
            engine.absorb_edits(flat)
            engine.fetch(flat)
            if flat.kept is not None:  # edits are found by comparing
                flat.place(flat.shard.clone(), apart=True)
            buffer = flat.gathered.clone() if flat.whole is flat.shard else flat.gathered
            for i, p in enumerate(flat.params):
                stand_ins[p] = nn.Parameter(flat.view(buffer, i).data, requires_grad=flat.requires_grad[i])
    for unit in engine.units:
        for slot in unit.slots:
            if slot.parameters.get(slot.name) is slot.flat.params[slot.index]:
                slot.parameters[slot.name] = stand_ins[slot.flat.params[slot.index]]
    return stand_ins


def leave_whole(engine: Engine, stand_ins: StandIns, keep: bool) -> tuple[list[str], list[str], list[str]]:
    """Put the sharded parameters back. Returns the names of those edited, replaced, and left with a gradient.

    If `keep`, a parameter that was replaced, or given another shape, stays in the model as it is, and is sharded like
    any parameter attached later.
    """
    engine.whole_depth -= 1
    replaced: list[ShardedParameter] = []
    for unit in engine.units:
        for slot in list(unit.slots):
            p, here = slot.flat.params[slot.index], slot.parameters.get(slot.name)
            stand_in = stand_ins[p]
            same = here is stand_in and tuple(stand_in.shape) == slot.flat.shapes[slot.index]
            if here is p or slot.module() is None:
                continue
            if not same:
                replaced.append(p)
            if keep and not same:
                unit.slots.remove(slot)
            else:
                slot.parameters[slot.name] = p
    try:
        edited, with_gradient = _compare(engine, stand_ins, set(replaced), keep)
    finally:
        for flat in engine.flats:
            engine.forget(flat)
            if flat.keeps(flat.shard.dtype):
                flat.place(flat.shard)
    if keep:
        engine.builder.attached = engine.builder.attached or bool(replaced)
        engine.adopt()
    return _names(edited), _names(replaced), _names(with_gradient)


def _names(params: list[ShardedParameter]) -> list[str]:
    return [p.qualified_name for p in params]


def _compare(
    engine: Engine, stand_ins: StandIns, replaced: set[ShardedParameter], keep: bool
) -> tuple[list[ShardedParameter], list[ShardedParameter]]:
    """Compare each rank's slice with its master, write back differences if `keep`, and share the findings.

    Raises:
        EngineError: on all ranks, if the edits of the ranks differ; nothing is written back then.
    """
    params = [p for p in stand_ins if p not in replaced]
    engine.meet("leave shardproof.whole")
    apart = differing(engine.comm, [digest(stand_ins[p]) for p in params])
    if apart:
        names = some(_names([params[i] for i in apart]))
        raise EngineError(
            f"{names}: edited inside shardproof.whole() on some ranks only, or to other values than on the rest, and "
            "dropped. Make the same edit on every rank."
        )
    differ = []
    for p in params:
        flat = p.flat
        with torch.no_grad():
            master = flat.locals[p.index].view(-1)
            new = flat.slice_of(stand_ins[p], p.index).to(flat.device)
            old = master.to(new.dtype)
            differs = (old != new) & ~((old != old) & (new != new))  # nan equals nan
            differ.append(bool(differs.any()))
            if keep and differ[-1]:
                master[differs] = new[differs].to(master.dtype)
    found = on_any_rank(engine.comm, [*differ, *(stand_ins[p].grad is not None for p in params)])
    edited, with_gradient = list(compress(params, found)), list(compress(params, found[len(params) :]))
    for p in edited if keep else ():
        p.flat.changed(p.index)
    return edited, with_gradient


# --- full state dicts -------------------------------------------------------------------------------


def _master(engine: Engine, flat: Flat) -> torch.Tensor:
    """The whole master values of `flat`, on the device."""
    engine.absorb_edits(flat)
    if not engine.sharded:
        return flat.at_work(flat.shard)
    whole = engine.pool.take(flat.numel, flat.shard.dtype)
    return engine.comm.gather(whole, flat.at_work(flat.shard.detach()), tag=engine.tag(2 * flat.index)).wait()


def with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that add extra state to a state dict (`get_extra_state`), by its key."""
    found = {f"{name}.".lstrip(".") + _EXTRA: module for name, module in model.named_modules(remove_duplicate=False)}
    return {n: m for n, m in found.items() if type(m).set_extra_state is not nn.Module.set_extra_state}


def full_state_dict(engine: Engine, rank0_only: bool) -> dict[str, Any]:
    engine.adopt()
    engine.meet("collect the state dict")
    engine.written.compare_now()
    keep = engine.comm.rank == 0 or not rank0_only
    entries = engine.model.state_dict(keep_vars=True)
    names: dict[ShardedParameter, list[str]] = {}
    for name, value in entries.items():
        if isinstance(value, ShardedParameter):
            names.setdefault(value, []).append(name)
    result: dict[str, Any] = {}
    with torch.no_grad():
        for flat in engine.flats:
            here = [p for p in flat.params if p in names]
            if here:
                whole = _master(engine, flat)
                for p in here if keep else ():
                    result.update(dict.fromkeys(names[p], flat.view(whole, p.index).clone().cpu()))
    if not keep:
        return {}
    for name, value in entries.items():
        if name not in result:
            result[name] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
    return {name: result[name] for name in entries}


def load_full_state_dict(engine: Engine, state_dict: dict[str, Any], strict: bool) -> None:
    engine.adopt()
    engine.meet("load a state dict")
    extra = with_extra_state(engine.model)
    entries = {n: v for n, v in engine.model.state_dict(keep_vars=True).items() if n not in extra}
    shapes = {n: tuple(v.shape) for n, v in entries.items() if isinstance(v, torch.Tensor)}
    problem, names, unknown = "", [], []
    own: dict[str, Any] = {}
    items = state_dict.items() if isinstance(state_dict, Mapping) else [("", None)]
    if engine.comm.rank == 0 and not all(isinstance(v, torch.Tensor) for n, v in items if n in shapes or not n):
        problem = "load_full_state_dict takes a dict of names and tensors, as shardproof.full_state_dict returns it."
    elif engine.comm.rank == 0:
        names = [n for n in state_dict if n in shapes]
        own = {n: v for n, v in state_dict.items() if n in extra}
        unknown = [n for n in state_dict if n not in shapes and n not in extra]
        problem = _misfits(shapes, extra, state_dict, strict)
    problem, names, own, unknown = engine.comm.broadcast_object((problem, names, own, unknown))
    if problem:
        raise EngineError(problem)
    given = set(names)
    places = {v: n for n, v in entries.items() if n in given and isinstance(v, ShardedParameter)}
    with torch.no_grad():
        for flat in engine.flats:
            here = {p.index: places[p] for p in flat.params if p in places}
            if here:
                _load_flat(engine, flat, here, state_dict)
        for name in names:
            buffer = entries[name]
            if not isinstance(buffer, ShardedParameter):
                value = (
                    buffer.detach().clone() if engine.comm.rank else state_dict[name].to(buffer.device, buffer.dtype)
                )
                buffer.copy_(engine.comm.broadcast(value.contiguous()))
    for name, value in own.items():
        extra[name].set_extra_state(value)
    call_load_hooks(engine.model, [n for n in (*shapes, *extra) if n not in given and n not in own], unknown)


def call_load_hooks(model: nn.Module, missing: Iterable[str] = (), unknown: Iterable[str] = ()) -> None:
    """Call the post hooks of `load_state_dict`: modules may cache results computed from their values."""
    keys = _IncompatibleKeys(list(missing), list(unknown))
    for module in model.modules():
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, keys)


def _load_flat(engine: Engine, flat: Flat, here: dict[int, str], state_dict: dict[str, Any]) -> None:
    engine.absorb_edits(flat)
    if len(here) == len(flat.names):
        whole = engine.pool.take(flat.numel, flat.shard.dtype).zero_()
    else:
        whole = _master(engine, flat).clone()
    if engine.comm.rank == 0:
        for index, name in here.items():
            flat.view(whole, index).copy_(state_dict[name])
    engine.comm.broadcast(whole)
    flat.before_change()
    for index in here:
        flat.locals[index].view(-1).copy_(flat.slice_of(flat.view(whole, index), index))
        flat.changed(index)


def _misfits(shapes: dict[str, tuple[int, ...]], extra: Iterable[str], state_dict: dict[str, Any], strict: bool) -> str:
    lines = []
    known = {*shapes, *extra}
    missing = [n for n in (*shapes, *extra) if n not in state_dict] if strict else []
    unknown = [n for n in state_dict if n not in known] if strict else []
    wrong = [
        f"{n} {tuple(state_dict[n].shape)} instead of {shapes[n]}"
        for n in shapes
        if n in state_dict and tuple(state_dict[n].shape) != shapes[n]
    ]
    for what, names in (("missing", missing), ("not in the model", unknown), ("of another shape", wrong)):
        if names:
            lines.append(f"{len(names)} {what}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}")
    return "The state dict does not fit the model. " + "; ".join(lines) + "." if lines else ""
