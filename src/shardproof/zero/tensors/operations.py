"""What an operation on a sharded tensor means.

- reading metadata: answered locally;
- changing it in place: the same on every slice where the operation is element-wise, else on the whole
  value, of which each rank keeps its slice;
- norms: computed on slices, summed with one all-reduce;
- everything else: computed with the whole value, gathered through autograd.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardproof.errors import EngineError
from shardproof.zero.autograd import SavedTensors
from shardproof.zero.tensors.autograd_grad import grad_of_parameters, view_like
from shardproof.zero.tensors.norms import foreach_norm, linalg_norm, norm_of
from shardproof.zero.tensors.operation_kinds import ELEMENTWISE, LIKE, METADATA, RANDOM
from shardproof.zero.tensors.parameter import (
    ShardedGradient,
    ShardedParameter,
    ShardedTensor,
    ShardedValue,
    by_engine,
    use_saved_tensors,
)
from shardproof.zero.tensors.user_collectives import MODULE, collective

_T = torch.Tensor
_INIT = torch.nn.init.__file__


def _descriptor(name: str) -> Any:
    return getattr(_T, name)


def run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out `func` on arguments of which at least one is a sharded tensor."""
    handler = _HANDLERS.get(func)
    if handler is not None:
        result = handler(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if func in METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func in LIKE:
        return func(*map(_outline, args), **{name: _outline(value) for name, value in kwargs.items()})
    name = getattr(func, "__name__", "")
    if name.startswith("_foreach_") and name.endswith("_"):
        return _foreach_in_place(func, name, args, kwargs)
    if (name.endswith("_") and not name.endswith("__")) or name in ELEMENTWISE or name == "__setitem__":
        target = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
        if isinstance(target, ShardedTensor):
            return _in_place(func, name, target, args, kwargs)
    if isinstance(kwargs.get("out"), ShardedTensor):
        target = kwargs.pop("out")
        target.write(func(*_whole(args, []), **_whole(kwargs, [])))
        return target
    if getattr(func, "__module__", "") == MODULE:
        return collective(func, args, kwargs)
    return _on_whole(func, args, kwargs)


def _outline(value: Any) -> Any:
    """Of a sharded tensor only its shape, dtype and device."""
    if not isinstance(value, ShardedTensor):
        return value
    return torch.empty((), dtype=value.dtype, device=value.device).expand(tuple(value.shape))


def _whole(value: Any, found: list[ShardedTensor]) -> Any:
    """`value` with every sharded tensor inside it replaced by its whole value."""
    if isinstance(value, ShardedTensor):
        found.append(value)
        return value.whole()
    if isinstance(value, (list, tuple)):
        items = [_whole(v, found) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {k: _whole(v, found) for k, v in value.items()}
    return value


def _on_whole(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    found: list[ShardedTensor] = []
    args, kwargs = _whole(args, found), _whole(kwargs, found)
    owed = use_saved_tensors(found)
    try:
        return func(*args, **kwargs)
    finally:
        for _ in range(owed):
            SavedTensors.pop()


# --- in place -----------------------------------------------------------------------------------


def _check_leaf(target: ShardedTensor) -> None:
    if torch.is_grad_enabled() and isinstance(target, ShardedParameter) and target.flat.requires_grad[target.index]:
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation: parameter "
            f"'{target.qualified_name}'. Wrap the edit in torch.no_grad()."
        )


def _same_slices(a: ShardedTensor, b: ShardedTensor) -> bool:
    """On all ranks, or some would take another way than the rest."""
    return a.flat.shapes[a.index] == b.flat.shapes[b.index] and a.flat.cuts(a.index) == b.flat.cuts(b.index)


class _NotLocal(Exception):
    """An operand that has no slice matching the target's."""


def _slice_like(value: Any, target: ShardedTensor) -> Any:
    """The part of an operand that meets the target's slice, as finely kept as that: `lerp_` promotes nothing."""
    if not isinstance(value, torch.Tensor):
        return value
    if value is target:
        return target.local
    part, here, there, dtype = value, value.device, target.flat.device, target.local.dtype
    if isinstance(value, ShardedTensor):
        if not _same_slices(value, target):
            raise _NotLocal
        part, here = value.local, value.flat.device
    elif value.dim():
        if tuple(value.shape) != target.flat.shapes[target.index] or value.layout is not torch.strided:
            raise _NotLocal
        part = target.flat.slice_of(value, target.index).view(-1 if target.flat.engine.sharded else value.shape)
    part = part if here == there else part.to(there)
    finer = part.dtype != dtype and part.is_floating_point() and torch.promote_types(part.dtype, dtype) == dtype
    return part.to(dtype) if finer else part


def _in_place(func: Callable[..., Any], name: str, target: ShardedTensor, args: Any, kwargs: Any) -> Any:
    initializes = getattr(func, "__module__", "") == "torch.nn.init"
    if not initializes:
        _check_leaf(target)
    # `trunc_normal_` draws into a tensor of its own and copies it.
    draws = initializes or name in RANDOM or (name == "copy_" and sys._getframe(3).f_code.co_filename == _INIT)
    with torch.no_grad():
        target.before_change()
        if name in ELEMENTWISE and not draws:
            try:
                local = [_slice_like(a, target) for a in args]
                func(*local, **{k: _slice_like(v, target) for k, v in kwargs.items()})
            except _NotLocal:
                pass
            else:
                target.value_changed()
                target.note_written(name, [*args[1:], *kwargs.values()])
                return target
        value = target.whole().detach().clone()
        swap, lies = {id(target): value}, value.stride()
        func(*(swap.get(id(a), a) for a in args), **{k: swap.get(id(v), v) for k, v in kwargs.items()})
        if value.stride() != lies and type(target) is ShardedValue:
            raise EngineError(
                f"{name} on the .data or detach() of '{target.qualified_name}' would change its layout in memory, "
                f"not the parameter. Use {name.rstrip('_')}, which returns a view."
            )
        if draws:  # in one process there is one draw
            target.flat.engine.edits.meet(target.flat, target.index, the_same=True)
            target.flat.engine.comm.broadcast(value)
        target.write(value)
    return target


def _foreach_in_place(func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """`torch._foreach_*_`: local for every element-wise operation, which they all are."""
    targets = args[0]
    for target in targets:
        if isinstance(target, ShardedTensor):
            _check_leaf(target)
            target.before_change()

    def listed(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and len(value) == len(targets)

    def local(value: Any) -> Any:
        if listed(value):
            pairs = zip(value, targets, strict=True)
            return [_slice_like(v, t) if isinstance(t, ShardedTensor) else _whole(v, []) for v, t in pairs]
        if isinstance(value, torch.Tensor) and targets:  # one factor for all
            return value.to(targets[0].flat.device if isinstance(targets[0], ShardedTensor) else targets[0].device)
        return value

    with torch.no_grad():
        try:
            func(*(local(a) for a in args), **{k: local(v) for k, v in kwargs.items()})
        except _NotLocal:
            for i, target in enumerate(targets):
                rest = [[a[i]] if listed(a) else a for a in args[1:]]
                named = {k: [v[i]] if listed(v) else v for k, v in kwargs.items()}
                value = target.whole().detach().clone() if isinstance(target, ShardedTensor) else target
                func([value], *_whole(rest, []), **_whole(named, []))
                if isinstance(target, ShardedTensor):
                    target.write(value)
            return targets
        for i, target in enumerate(targets):
            if isinstance(target, ShardedTensor):
                target.value_changed()
                target.note_written(name, [v[i] if listed(v) else v for v in (*args[1:], *kwargs.values())])
    return targets


# --- scaling ---------------------------------------------------------------------------------------


def _unscale(grads: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Gradient scaling: every rank must see the overflow of any."""
    local = [g.local if isinstance(g, ShardedTensor) else g for g in grads]
    devices = [g.flat.device if isinstance(g, ShardedTensor) else g.device for g in grads]
    for device in dict.fromkeys(devices):  # with offload they lie elsewhere than the scale
        here = [g for g, there in zip(local, devices, strict=True) if there == device]
        found = found_inf.to(device)
        torch._amp_foreach_non_finite_check_and_unscale_(here, found, inv_scale.to(device))
        if found is not found_inf:
            found_inf.copy_(torch.maximum(found_inf, found.to(found_inf.device)))
    sharded = [g for g in grads if isinstance(g, ShardedTensor)]
    for grad in sharded:
        grad.value_changed()
    for engine in by_engine(sharded):
        engine.meet("unscale gradients")
        engine.comm.largest(found_inf)


# --- gradients, data, requires_grad ------------------------------------------------------------------


def _get_grad(t: ShardedTensor) -> Any:
    if isinstance(t, ShardedParameter):
        return t.grad
    with torch._C.DisableTorchFunctionSubclass():
        return t.grad


def _set_grad(t: ShardedTensor, value: torch.Tensor | None) -> None:
    if isinstance(t, ShardedParameter):
        t.grad = value
        return
    with torch._C.DisableTorchFunctionSubclass():
        t.grad = value


def _get_data(t: ShardedTensor) -> ShardedTensor:
    return t.another() if isinstance(t, ShardedValue) else t.flat.without_graph(t)


def _set_data(t: ShardedTensor, value: torch.Tensor) -> None:
    if tuple(value.shape) != tuple(t.shape):
        raise EngineError(
            f"'{t.qualified_name}' has shape {tuple(t.shape)} and was assigned data of shape {tuple(value.shape)}. "
            "Change shapes inside `with shardproof.whole(model, writeback=True):`, or before `shardproof.shard`."
        )
    if value.dtype != t.dtype or value.device != t.device:
        raise EngineError(
            f"'{t.qualified_name}' is {t.dtype} on {t.device} and was assigned {value.dtype} on {value.device}. "
            "Choose dtype and device before `shardproof.shard`, or with its mixed_precision= and device= arguments."
        )
    if isinstance(t, ShardedValue):
        t.assign(value)
    else:
        t.write(value.whole() if isinstance(value, ShardedTensor) else value)


def _set_grad_dtype(t: ShardedTensor, dtype: torch.dtype | None) -> None:
    if dtype not in (t.dtype, t.flat.grad_dtype):
        raise EngineError(
            f"'{t.qualified_name}' accumulates gradients in {t.flat.grad_dtype}, not in {dtype}. Choose that dtype "
            "in shardproof.shard: mixed_precision=MixedPrecision(reduce=torch.float32)."
        )


def _set_requires_grad(t: ShardedTensor, flag: bool = True) -> ShardedTensor:
    if isinstance(t, ShardedParameter):
        t.flat.set_requires_grad(t.index, bool(flag))
        with torch._C.DisableTorchFunctionSubclass():
            listening = t.requires_grad or not flag
            _T.requires_grad_(t, flag)
        if not listening:
            t.listen()
    elif isinstance(t, ShardedValue):
        t.is_trained = bool(flag)
        with torch._C.DisableTorchFunctionSubclass():
            _T.requires_grad_(t, flag)
    elif isinstance(t, ShardedGradient) and not flag:
        t.flat.leave_graph(t)
    return t


def _assign_requires_grad(t: ShardedTensor, flag: bool) -> None:
    """The same as an attribute. What an override of an attribute returns, torch never lets go of."""
    _set_requires_grad(t, flag)


def _refuse_swap(t: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    """A module would put a plain parameter in the place of this one, which no unit and no optimizer knows."""
    raise EngineError(
        f"torch.__future__.set_swap_module_params_on_conversion(True) is in force: '{t.qualified_name}' would be "
        "exchanged for a parameter that does not train. Set it to False around load_state_dict of a sharded model, "
        "and around what converts it."
    )


def _conversion(func: Callable[..., Any]) -> Callable[..., Any]:
    """`p.to(...)`, `p.float()` ...: `p` itself where nothing changes, as in plain torch."""

    def convert(t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if (
            isinstance(t, ShardedParameter)
            and torch.__future__.get_swap_module_params_on_conversion()
            and nn.Module._apply.__code__ in (sys._getframe(i).f_code for i in (4, 5))  # behind ours and a lambda
        ):
            _refuse_swap(t)
        if isinstance(t, ShardedTensor):
            return t if t.stays(func, args, kwargs) else NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            return func(t, *args, **kwargs)

    return convert


def _register_hook(p: Any, hook: Callable[..., Any]) -> Any:
    return p.flat.engine.gradients.add_hook(p.flat.gradient_hooks, p.index, hook)


def _register_post_hook(p: Any, hook: Callable[..., Any]) -> Any:
    return p.flat.engine.gradients.add_hook(p.flat.post_hooks, p.index, hook)


def _autograd_grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad` with respect to sharded parameters: whole gradients, the mean over ranks."""
    options = {"retain_graph": retain_graph, "create_graph": create_graph, "is_grads_batched": is_grads_batched}
    strict = not (allow_unused or materialize_grads)
    return grad_of_parameters(_whole(outputs, []), tuple(inputs), grad_outputs, strict, materialize_grads, options)


def _autograd_backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """`loss.backward(inputs=[p])`: parameters are named by their edges in the graph."""
    with torch._C.DisableTorchFunctionSubclass():
        edges = None if inputs is None else [torch.autograd.graph.get_gradient_edge(x) for x in inputs]
    torch.autograd.backward(_whole(tensors, []), grad_tensors, retain_graph, create_graph, inputs=edges)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    _descriptor("grad").__get__: _get_grad,
    _descriptor("grad").__set__: _set_grad,
    _descriptor("grad").__delete__: lambda t: _set_grad(t, None),
    _descriptor("data").__get__: _get_data,
    _descriptor("data").__set__: _set_data,
    _T.detach: _get_data,
    torch.detach: _get_data,
    _descriptor("requires_grad").__set__: _assign_requires_grad,
    _descriptor("grad_dtype").__set__: _set_grad_dtype,
    _T.requires_grad_: _set_requires_grad,
    _T.module_load: _refuse_swap,
    _T.view_as: view_like,
    _T.expand_as: view_like,
    **dict.fromkeys((_T.detach_, torch.detach_), lambda t: _set_requires_grad(t, False)),
    _T.retain_grad: lambda t: None,
    **dict.fromkeys((_T.share_memory_, _T.contiguous), lambda t, **_: t),
    **{f: _conversion(f) for f in (_T.to, _T.float, _T.half, _T.bfloat16, _T.double, _T.cpu, _T.cuda, _T.type_as)},
    _T.norm: norm_of,
    torch.norm: norm_of,
    torch.linalg.vector_norm: norm_of,
    torch.linalg.norm: linalg_norm,
    torch._foreach_norm: foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    torch.autograd.grad: _autograd_grad,
    torch.autograd.backward: _autograd_backward,
    _T.register_hook: _register_hook,
    _T.register_post_accumulate_grad_hook: _register_post_hook,
}

# torch clips gradients of types that it knows in a few operations for all, and of others one by one.
with contextlib.suppress(AttributeError):
    torch.utils._foreach_utils._foreach_supported_types.append(ShardedGradient)
