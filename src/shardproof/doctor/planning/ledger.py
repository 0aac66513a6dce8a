"""Every allocation and release of one training step, in order, with its purpose.

The step runs on the meta device: operations have shapes, dtypes and lifetimes, but use no memory. So a model of any
size can be examined on any machine.
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

from shardproof.doctor.planning.known_results import KnownResults

KINDS = ("weights", "gradients", "optimizer", "gathered", "reducing", "activations")
WEIGHTS, GRADIENTS, OPTIMIZER, GATHERED, REDUCING, ACTIVATIONS = range(len(KINDS))
# Kinds off the computing device: offloaded data, and activations that the host holds.
HOME, HELD = len(KINDS), len(KINDS) + 1

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SCALAR = torch.ops.aten._local_scalar_dense.default
_INDEX = torch.ops.aten.index.Tensor
_c10d = torch.ops.c10d
_GATHERS = {_c10d._allgather_base_.default}
_REDUCTIONS = {_c10d._reduce_scatter_base_.default, _c10d.allreduce_.default}
_BY_HAND = {_c10d.send.default, _c10d.recv_.default}


@dataclass
class Trace:
    """The events between the start and the end of a step.

    Attributes:
        live: bytes of each storage that existed at the start, by number.
        events: the number of a storage that was allocated, or its complement if it was released.
        sizes: bytes of each storage, by number; `kinds`: its purpose, an index of `KINDS`, `HOME` or `HELD`.
        marks: names of moments, with the number of events before each.
    """

    live: list[int]
    events: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    marks: list[tuple[str, int]] = field(default_factory=list)


class Ledger(TorchDispatchMode):
    """While active, records allocations and releases on the meta device.

    Args:
        known: results from other ledgers.
        yes: the answer to a model's question whether all values meet a condition.

    Attributes:
        usual: the default kind.
        number: the answer to a request for a value; None lets it fail.
        flops: floating-point operations of matrix products and attention so far.
        calls: torch operations so far.
    """

    def __init__(self, known: KnownResults | None = None, yes: bool = True) -> None:
        super().__init__()
        self.usual = ACTIVATIONS
        self.number: float | None = None
        self.sizes: list[int] = []
        self.kinds: list[int] = []
        self.events: list[int] = []
        self.marks: list[tuple[str, int]] = []
        self.flops = self.calls = 0
        self._known, self._yes = known or KnownResults(), yes
        self._present: dict[int, tuple[int, weakref.ref[Any]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and disabling Dynamo at each operation would take half of the time

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is _SCALAR and args[0].is_meta:
            if args[0].dtype == torch.bool:
                return self._yes  # models check whether rows have no padding and are not packed
            if self.number is not None:
                return self.number
        kwargs = kwargs or {}
        self.calls += 1
        if func is _INDEX:
            args = (args[0], _all_of(args[1]))
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
        """Record the buffers of a collective, whose purpose is known here. Manual exchanges have it in their tag."""
        reduces = func in _REDUCTIONS or (func in _BY_HAND and args[-1] % 2 == 1)
        if not reduces and func not in _GATHERS | _BY_HAND:
            return
        for arg in args:
            for tensor in arg if isinstance(arg, (list, tuple)) else [arg]:
                if isinstance(tensor, torch.Tensor):
                    self.note(tensor, REDUCING if reduces else GATHERED, only=ACTIVATIONS)

    def note(self, tensor: torch.Tensor, kind: int | None = None, only: int | None = None) -> None:
        """Record the storage of `tensor` and its purpose; with `only`, unless it has another purpose already."""
        if not tensor.is_meta or type(tensor) not in _PLAIN:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._present.get(key)
        if known is None:
            number = len(self.sizes)
            self._present[key] = number, weakref.ref(storage, self._leaves(key, number))
            self.sizes.append(storage.nbytes())
            self.kinds.append(self.usual if kind is None else kind)
            self.events.append(number)
        elif kind is not None and only in (None, self.kinds[known[0]]):
            self.kinds[known[0]] = kind

    def _leaves(self, key: int, number: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            self._present.pop(key, None)
            self.events.append(~number)

        return gone

    def here(self) -> int:
        """Live bytes on the computing device."""
        return sum(self.sizes[number] for number, _ in self._present.values() if self.kinds[number] < HOME)

    def mark(self, name: str) -> None:
        """Name the current moment."""
        self.marks.append((name, len(self.events)))

    @contextmanager
    def step(self) -> Iterator[Trace]:
        """Record one step; the trace is complete when the context ends. Allocations are seen while this mode is active,
        releases always."""
        live = [number for number, _ in self._present.values()]
        trace = Trace(live)
        begin, self.marks = len(self.events), []
        yield trace
        trace.events = self.events[begin:]
        trace.sizes, trace.kinds = self.sizes, list(self.kinds)
        trace.marks = [(name, at - begin) for name, at in self.marks]


class FlashAttention(TorchFunctionMode):
    """Attention as kernels compute it, without the matrix of all pairs: on the meta device torch would decompose it."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return _attend(*args, **kwargs)

    @staticmethod
    def backward(loss: torch.Tensor) -> None:
        """`loss.backward()` with this mode active in recomputations: torch's own is intercepted by modes, and disables
        them inside."""
        _run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _all_of(indices: Any) -> list[torch.Tensor | None]:
    """A mask among indices selects everything: its values are unknown, and rows have no padding."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        mask = index is not None and index.is_meta and index.dtype == torch.bool
        found += [index.new_empty(index.numel(), dtype=torch.long)] * index.dim() if mask else [index]
    return found


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
    out: torch.Tensor
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # kernels add it, so torch converts it to numbers first
        nothing = torch.scalar_tensor(float("-inf"), dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, 0.0, nothing)
    if query.shape[-1] == value.shape[-1]:
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out = attention(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
        return out
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention  # value heads may have another size
    if attn_mask is not None:
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], -1, -1)
    out = efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
    return out
