"""Every allocation and release of one training step, in order, with what it is for.

The step runs on the meta device: operations give shapes, dtypes and lifetimes, but no memory. So a model of any size
can be looked at on any machine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward as _run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

KINDS = ("weights", "gradients", "optimizer", "gathered", "reducing", "activations")
WEIGHTS, GRADIENTS, OPTIMIZER, GATHERED, REDUCING, ACTIVATIONS = range(len(KINDS))
HOME = len(KINDS)  # what lies elsewhere than where the model computes

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_META = object()  # begins the signature of a tensor
_SCALAR = torch.ops.aten._local_scalar_dense.default
_c10d = torch.ops.c10d
_GATHERS = {_c10d._allgather_base_.default}
_REDUCTIONS = {_c10d._reduce_scatter_base_.default, _c10d.allreduce_.default}
_BY_HAND = {_c10d.send.default, _c10d.recv_.default}


@dataclass
class Trace:
    """What happened between the begin and the end of a step.

    Attributes:
        live: bytes of each storage that was there at the begin, by number.
        events: the number of a storage that came, or its complement where it went.
        sizes: bytes of each storage, by number; `kinds` what it was for, an index of `KINDS`, or `HOME`.
        marks: names of moments, and how many events came before.
        flops: floating-point operations of matrix products and attention.
    """

    live: list[int]
    events: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    marks: list[tuple[str, int]] = field(default_factory=list)
    flops: int = 0


class KnownResults:
    """What operations return, remembered by the shapes they were given: many of torch's meta functions are slow Python,
    and equal blocks ask the same again."""

    def __init__(self) -> None:
        self._fresh: dict[Any, bool] = {}  # by operation: whether all it returns is new memory
        self._results: dict[Any, tuple[Any, int]] = {}

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
        """What `func` returns, and its floating-point operations."""
        if func not in self._fresh:
            schema = func._schema
            aliased = any(part.alias_info is not None for part in (*schema.arguments, *schema.returns))
            self._fresh[func] = not aliased and func.namespace == "aten"
        if not self._fresh[func]:
            return func(*args, **kwargs), 0
        try:
            key = func, _signature(args), _signature(tuple(kwargs.items())) if kwargs else ()
            known = self._results.get(key)
        except TypeError:  # something in it is no plain value
            return func(*args, **kwargs), 0
        if known is not None:
            return _made(known[0]), known[1]
        out = func(*args, **kwargs)
        counted = flop_registry.get(func._overloadpacket)
        flops = int(counted(*args, **kwargs, out_val=out)) if counted is not None else 0
        shape = _signature(out)
        if not _only_meta(shape):
            return out, flops
        if _storages(out) & _storages((args, tuple(kwargs.values()))):  # a view that does not say so (_unsafe_view)
            self._fresh[func] = False
        else:
            self._results[key] = shape, flops
        return out, flops


def _signature(value: Any) -> Any:
    """Hashable, and equal where values are of the same types, shapes and numbers."""
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
    """Tensors of a signature."""
    if shape[0] is _META:
        return torch.empty_strided(shape[1], shape[2], dtype=shape[3], device="meta")
    return tuple(_made(part) for part in shape)


class Ledger(TorchDispatchMode):
    """While active, notes what comes and goes on the meta device. `known`: results of other ledgers."""

    def __init__(self, known: KnownResults | None = None) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.kinds: list[int] = []
        self.events: list[int] = []
        self.marks: list[tuple[str, int]] = []
        self.flops = 0
        self._known = known or KnownResults()
        self._present: dict[int, tuple[int, weakref.ref[Any]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to say so at each operation takes half of the time

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is _SCALAR and args[0].is_meta and args[0].dtype == torch.bool:
            return True  # models ask whether rows are without padding, and not packed: they are
        kwargs = kwargs or {}
        out, flops = self._known.result(func, args, kwargs)
        self.flops += flops
        if isinstance(out, torch.Tensor):
            self.note(out)
        elif isinstance(out, (tuple, list)):
            for part in out:
                if isinstance(part, torch.Tensor):
                    self.note(part)
        if func.namespace == "c10d":
            self._moved(func, args)
        return out

    def _moved(self, func: Any, args: tuple[Any, ...]) -> None:
        """The buffers of a collective: what it is for is known here. Exchanges by hand have it in their tag."""
        reduces = func in _REDUCTIONS or (func in _BY_HAND and args[-1] % 2 == 1)
        if not reduces and func not in _GATHERS | _BY_HAND:
            return
        for arg in args:
            for tensor in arg if isinstance(arg, (list, tuple)) else [arg]:
                if isinstance(tensor, torch.Tensor):
                    self.note(tensor, REDUCING if reduces else GATHERED, only=ACTIVATIONS)

    def note(self, tensor: torch.Tensor, kind: int = ACTIVATIONS, only: int | None = None) -> None:
        """Know the storage of `tensor`, and what it is for; with `only`, unless it is known for something else."""
        if not tensor.is_meta or type(tensor) not in _PLAIN:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._present.get(key)
        if known is None:
            number = len(self.sizes)
            self._present[key] = number, weakref.ref(storage, self._leaves(key, number))
            self.sizes.append(storage.nbytes())
            self.kinds.append(kind)
            self.events.append(number)
        elif kind != ACTIVATIONS and only in (None, self.kinds[known[0]]):
            self.kinds[known[0]] = kind

    def _leaves(self, key: int, number: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            self._present.pop(key, None)
            self.events.append(~number)

        return gone

    def mark(self, name: str) -> None:
        """Name the present moment."""
        self.marks.append((name, len(self.events)))

    @contextmanager
    def step(self) -> Iterator[Trace]:
        """Note one step; the trace is complete when the context ends. What is allocated is seen while this is active as
        a mode; what goes is always seen."""
        live = [number for number, _ in self._present.values()]
        trace = Trace(live)
        begin, self.marks, self.flops = len(self.events), [], 0
        yield trace
        trace.events = self.events[begin:]
        trace.sizes, trace.kinds = self.sizes, list(self.kinds)
        trace.marks = [(name, at - begin) for name, at in self.marks]
        trace.flops = self.flops


class FlashAttention(TorchFunctionMode):
    """Attention as kernels compute it, without the matrix of all pairs: on the meta device torch would take its
    formula apart."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return _attend(*args, **kwargs)

    @staticmethod
    def backward(loss: torch.Tensor) -> None:
        """`loss.backward()` with this mode active in recomputations: torch's own goes through modes, and hides them."""
        _run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: torch.Tensor = attention(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return out
