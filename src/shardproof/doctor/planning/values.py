"""Values of a few tensors on the meta device: those that depend on the row alone, such as ids and sizes of images.

Models with towers need values: how many patches an image has, where its tokens are among the ids, which images are only
padding. None of these depends on weights. So a storage on the meta device whose values are known has a shadow in
memory, and operations on one are applied to the other. Views and in-place edits need no special care: tensors that
share a storage share its shadow.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

MOST = 1 << 24  # largest tensor to track; only masks of all pairs are larger, and their values are not needed

_aten = torch.ops.aten
_ASK = {_aten._local_scalar_dense.default, _aten.equal.default}
_UNFILLED = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
_BY_SHAPE = {  # they use only shape and dtype of a tensor
    *(_aten.zeros_like, _aten.ones_like, _aten.full_like),
    *(_aten.new_zeros, _aten.new_ones, _aten.new_full),
}
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}


class Values(TorchDispatchMode):
    """While active, tracks known values: tensors from `on_meta`, tensors made from numbers, and results computed from
    these alone."""

    def __init__(self) -> None:
        super().__init__()
        self._shadows: dict[int, tuple[weakref.ref[Any], torch.UntypedStorage]] = {}
        self._literals = _Literals(self)

    def __enter__(self) -> Values:
        self._literals.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._literals.__exit__(*error)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as for the ledger

    def on_meta(self, real: torch.Tensor) -> torch.Tensor:
        """A tensor on the meta device whose values are known."""
        made = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        self._know(made, real)
        return made

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor, if they are known."""
        if not tensor.is_meta:
            return tensor
        found = self._shadows.get(tensor.untyped_storage()._cdata)
        if found is None:
            return None
        nothing = torch.empty(0, dtype=tensor.dtype)
        return nothing.set_(found[1], tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload,no-any-return]

    def _know(self, tensor: torch.Tensor, real: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._shadows:  # otherwise it is a view or was edited in place, and so was the shadow
            held = torch.empty_strided(tensor.shape, tensor.stride(), dtype=real.dtype).copy_(real).untyped_storage()
            self._shadows[key] = weakref.ref(storage, lambda _: self._shadows.pop(key, None)), held

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(_tensors((args, kwargs)))
        if not tensors or func._overloadpacket in _BY_SHAPE:
            return self._made(func, args, kwargs)
        reals = {id(tensor): self.known(tensor) for tensor in tensors}
        if any(real is None for real in reals.values()):
            return self._beside_unknown(func, args, kwargs)
        there, more = tree_map_only(torch.Tensor, lambda tensor: reals[id(tensor)], (args, kwargs))
        to = torch.device(kwargs.get("device") or tensors[0].device).type
        if func in _ASK or to != "meta":
            return func(*there, **more)
        more |= {"device": torch.device("cpu")} if "device" in more else {}
        masked = func is _aten.index.Tensor and any(_is_mask(index) for index in args[1])
        if masked or torch.Tag.dynamic_output_shape in func.tags:
            return tree_map_only(torch.Tensor, self.on_meta, func(*there, **more))
        out = func(*args, **kwargs)
        most = max(MOST, *(tensor.numel() for tensor in tensors))  # a row may have any number of pixels
        if all(tensor.numel() <= most for tensor in _tensors(out)):
            for mine, real in zip(_tensors(out), _tensors(func(*there, **more)), strict=True):
                self._know(mine, real)
        else:
            self._forget_written(func, args)
        return out

    def _made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Tensors made from numbers and shapes. Those with the shape of weights are not tracked."""
        out = func(*args, **kwargs)
        known = isinstance(out, torch.Tensor) and out.is_meta and out.numel() <= MOST
        if not known or func._overloadpacket in _UNFILLED or torch.Tag.nondeterministic_seeded in func.tags:
            return out
        if func._overloadpacket in _BY_SHAPE:
            if out.is_floating_point():
                return out
            args = (torch.empty_strided(out.shape, out.stride(), dtype=args[0].dtype), *args[1:])
        self._know(out, func(*args, **{**kwargs, "device": torch.device("cpu")}))
        return out

    def _beside_unknown(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation with tensors whose values are unknown: for known masks, their positions are used."""
        if func in _INDEXED:
            args = (args[0], [place for index in args[1] for place in self._places(index)], *args[2:])
        self._forget_written(func, args)
        return func(*args, **kwargs)

    def _places(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        real = self.known(index) if index is not None and _is_mask(index) else None
        return [index] if real is None else [self.on_meta(part) for part in real.nonzero(as_tuple=True)]

    def _forget_written(self, func: Any, args: tuple[Any, ...]) -> None:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(value):
                    self._shadows.pop(tensor.untyped_storage()._cdata, None)


class _Literals(TorchFunctionMode):
    """`torch.tensor` of numbers: on the meta device it drops them before a dispatch mode sees them."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to = torch.device(kwargs.get("device") or "cpu").type
        if func not in (torch.tensor, torch.as_tensor) or to != "meta" or isinstance(args[0], torch.Tensor):
            return func(*args, **kwargs)
        return self._values.on_meta(func(self._numbers(args[0]), *args[1:], **{**kwargs, "device": "cpu"}))

    def _numbers(self, data: Any) -> Any:
        """Lists may hold tensors of one number each."""
        if isinstance(data, (list, tuple)):
            return [self._numbers(part) for part in data]
        real = self._values.known(data) if isinstance(data, torch.Tensor) else None
        return data if real is None else real.tolist()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool
