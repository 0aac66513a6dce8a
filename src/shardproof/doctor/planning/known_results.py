"""What operations return on the meta device, and how much they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_META = object()  # marks the signature of a tensor
_aten = torch.ops.aten


def _pairs(tensors: tuple[torch.Tensor, ...], causal: bool, products: int) -> int:
    """The operations of `products` matrix products over all pairs of tokens, half of which a kernel skips if `causal`.
    Half of the products run over the head size of keys, the other half over that of values. `tensors`: query, key and
    value."""
    query, key, value = tensors
    rows, heads, length, size = query.shape
    operations = rows * heads * length * key.shape[2] * (size + value.shape[3]) * products
    return operations // 2 if causal else operations


def _grouped(a: torch.Tensor, b: torch.Tensor) -> int:
    """Each row is multiplied by the matrix of its group only: the groups share one dimension."""
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


# Formulas that torch's registry lacks, or that ignore causal masks.
_OWN: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda args, more: _pairs(
        args[:3], bool(_argument(args, more, 4, "is_causal")), 2
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda args, more: _pairs(
        args[1:4], bool(_argument(args, more, 7, "is_causal")), 5
    ),
    _aten._scaled_dot_product_efficient_attention: lambda args, more: _pairs(
        args[:3], bool(_argument(args, more, 6, "is_causal")), 2
    ),
    _aten._scaled_dot_product_efficient_attention_backward: lambda args, more: _pairs(
        args[1:4], bool(_argument(args, more, 11, "is_causal")), 5
    ),
    _aten.addmm_: lambda args, more: flop_registry[_aten.addmm](*args, **more, out_val=args[0]),
    _aten._grouped_mm: lambda args, more: _grouped(*args[:2]),
}


def operations_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Floating-point operations of matrix products, convolutions and attention; 0 for everything else."""
    own = _OWN.get(func._overloadpacket)
    if own is not None:
        return own(args, kwargs)
    counted = flop_registry.get(func._overloadpacket)
    return int(counted(*args, **kwargs, out_val=out)) if counted is not None else 0


class KnownResults:
    """A cache of the results of operations by input shapes: many of torch's meta functions are slow Python, and equal
    blocks repeat the same calls."""

    def __init__(self) -> None:
        self.told = False  # whether slowness was reported
        self._fresh: dict[Any, bool] = {}  # by operation: whether all its results are new memory
        self._results: dict[Any, tuple[Any, int]] = {}

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
        """What `func` returns, and its floating-point operations."""
        if func not in self._fresh:
            schema = func._schema
            aliased = any(part.alias_info is not None for part in (*schema.arguments, *schema.returns))
            self._fresh[func] = not aliased and func.namespace == "aten"
        if not self._fresh[func]:
            out = func(*args, **kwargs)
            return out, operations_of(func, args, kwargs, out)
        try:
            key = func, _signature(args), _signature(tuple(kwargs.items())) if kwargs else ()
            known = self._results.get(key)
        except TypeError:  # it contains something other than plain values
            return func(*args, **kwargs), 0
        if known is not None:
            return _made(known[0]), known[1]
        out = _of_shapes(func, args, kwargs)
        flops = operations_of(func, args, kwargs, out)
        shape = _signature(out)
        if not _only_meta(shape):
            return out, flops
        if _storages(out) & _storages((args, tuple(kwargs.values()))):  # an undeclared view (_unsafe_view)
            self._fresh[func] = False
        else:
            self._results[key] = shape, flops
        return out, flops


def _of_shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation. The meta function of grouped products takes bfloat16 only, unlike the kernels."""
    if func._overloadpacket is not _aten._grouped_mm or not args[0].is_meta or args[0].dtype is torch.bfloat16:
        return func(*args, **kwargs)
    a, b = (torch.empty_like(factor, dtype=torch.bfloat16) for factor in args[:2])
    return func(a, b, *args[2:], **kwargs).to(args[0].dtype)


def _signature(value: Any) -> Any:
    """Hashable, and equal for values of the same types, shapes and numbers."""
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return _META, value.shape, value.stride(), value.dtype, "meta" if value.is_meta else value.device
    if kind is tuple or kind is list:
        return tuple([_signature(part) for part in value])
    if isinstance(value, torch.Tensor):
        raise TypeError
    return kind, value


def _storages(value: Any) -> set[int]:
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage()._cdata}
    return set().union(*map(_storages, value)) if isinstance(value, (list, tuple)) else set()


def _only_meta(shape: Any) -> bool:
    if shape and shape[0] is _META:
        return bool(shape[4] == "meta")
    return bool(shape) and all(isinstance(part, tuple) and _only_meta(part) for part in shape)


def _made(shape: Any) -> Any:
    """Tensors with this signature."""
    if shape[0] is _META:
        return torch.empty_strided(shape[1], shape[2], dtype=shape[3], device="meta")
    return tuple(_made(part) for part in shape)
