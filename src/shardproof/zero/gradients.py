"""Gradients: what each rank contributes, when it is reduced, and when it is final.

Contributions of this rank, divided by the number of ranks, add up in a whole-sized buffer, `Flat.partial`; a
reduction turns it into a part of `Flat.grad`. Reductions run beside the backward pass. A gradient is final when
it is first looked at (`p.grad`, clipping, the optimizer's step), outside of backward.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from shardproof.zero.autograd import ReduceMean
from shardproof.zero.parameter import ShardedGradient, ShardedTensor, norms_of

if TYPE_CHECKING:
    from shardproof.zero.collectives import Pending
    from shardproof.zero.schedule import Engine
    from shardproof.zero.unit import Flat

REDUCTIONS_IN_FLIGHT = 2


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Gradients:
    """The gradients of one engine.

    Attributes:
        sync_depth: how many `no_sync` contexts are open.
        dirty: whether some gradient is not final.
        end_is_noted: whether autograd will call `end_backward` at the end of the present backward pass.
        generation: how often gradients have changed.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.comm = engine, engine.comm
        self.sync_depth = 0
        self.in_flight: deque[tuple[Flat, Pending]] = deque()
        self.agreement: tuple[Pending | None, torch.Tensor, list[Flat]] | None = None
        self.dirty = False
        self.end_is_noted = False
        self.generation = 0
        self._norms: dict[Any, tuple[int, dict[tuple[int, int], torch.Tensor]]] = {}

    # --- inside backward --------------------------------------------------------------------------

    def note_backward(self) -> None:
        """Have `end_backward` called when the outermost backward pass that we know of is through."""
        if not self.end_is_noted:
            self.end_is_noted = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)  # type: ignore[attr-defined]

    def receive(self, flat: Flat, indices: tuple[int, ...], grads: tuple[torch.Tensor | None, ...]) -> Any:
        """Take this rank's whole gradients for the parameters `indices`, from the backward of one gather.

        Returns the reduced gradient where `torch.autograd.grad` asked for it, else None.
        """
        if flat.gradient_hooks:
            grads = tuple(_call_hooks(flat, i, g) for i, g in zip(indices, grads, strict=True))
        got = [(i, g) for i, g in zip(indices, grads, strict=True) if g is not None]
        if flat.captured is not None:
            flat.captured.update(i for i, _ in got)
            return self._reduce_in_graph(flat, got)
        self.note_backward()
        self.dirty = True
        for index, _ in got:
            flat.used[index] = True
        if torch.is_grad_enabled():  # create_graph=True: the gradient is part of a graph itself
            flat.add_gradient(self._reduce_in_graph(flat, got))
            return None
        if flat.partial is None:
            flat.partial = self.engine.pool.take(flat.numel, flat.grad_dtype)
            flat.fill(flat.partial, got, 1.0 / self.comm.size)
        else:
            for index, grad in got:
                flat.view(flat.partial, index).add_(grad, alpha=1.0 / self.comm.size)
        whole_unit = len(indices) == len(flat.names)
        if whole_unit:
            self.engine.used_up(flat.unit)
        if whole_unit and self.sync_depth == 0 and self.engine.stage != 1:
            self._reduce(flat)
        return None

    def _reduce_in_graph(self, flat: Flat, got: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
        pieces, end = [], 0
        for index, grad in got:
            pieces += [flat.shard.new_zeros(flat.offsets[index] - end), grad.reshape(-1).to(flat.shard.dtype)]
            end = flat.offsets[index] + flat.numels[index]
        whole = torch.cat([*pieces, flat.shard.new_zeros(flat.numel - end)])
        return cast("torch.Tensor", ReduceMean.apply(whole, flat))

    def _reduce(self, flat: Flat) -> None:
        """Start reducing `flat.partial`; finish the oldest reduction when too many are in flight."""
        partial, flat.partial = cast("torch.Tensor", flat.partial), None
        if self.comm.size == 1:
            flat.add_gradient(partial)
            return
        self.comm.same_everywhere(f"reduce {flat.unit.name}")
        scatter = self.engine.sharded
        pending = (self.comm.reduce_scatter if scatter else self.comm.all_reduce)(partial, 2 * flat.index + 1)
        flat.unit.counters.reductions += 1
        flat.unit.counters.bytes_reduced += partial.numel() * partial.element_size() * (1 if scatter else 2)
        self.in_flight.append((flat, pending))
        self._drain(REDUCTIONS_IN_FLIGHT)

    def _drain(self, limit: int) -> None:
        while len(self.in_flight) > limit:
            flat, pending = self.in_flight.popleft()
            flat.add_gradient(pending.wait())

    # --- after backward ---------------------------------------------------------------------------

    def end_backward(self) -> None:
        """The backward pass is through: reduce what is left, and start agreeing on what was used."""
        self.end_is_noted = False
        if self.sync_depth == 0:
            self._flush()
        self.engine.backward_is_over()
        if any(flat.post_hooks for flat in self.engine.flats):
            self._finish()

    def _flush(self) -> None:
        with torch.no_grad():
            flats = self.engine.flats
            for flat in flats:
                if flat.partial is not None:
                    self._reduce(flat)
            self._settle()
            flats = [f for f in flats if any(f.requires_grad) or any(f.used)]
            flags = torch.tensor([u for f in flats for u in f.used], dtype=torch.uint8)
            for flat in flats:
                flat.used = [False] * len(flat.names)
            self.comm.same_everywhere("end of backward")
            pending = self.comm.agree(flags) if self.comm.size > 1 and len(flags) else None
            self.agreement = (pending, flags, flats)

    def _settle(self) -> None:
        """Apply the agreement: a parameter has a gradient if any rank used it."""
        if self.agreement is None:
            return
        pending, flags, flats = self.agreement
        self.agreement = None
        if pending is not None:
            pending.wait()
        used = iter(flags.tolist())
        for flat in flats:
            flat.has_grad = [bool(next(used)) or had for had in flat.has_grad]

    def finish(self) -> None:
        """Make every gradient final, unless a backward pass is under way."""
        if self.dirty and not in_backward():
            self._finish()

    def _finish(self) -> None:
        with torch.no_grad():
            if self.agreement is None or any(f.partial is not None for f in self.engine.flats):
                self._flush()
            self._drain(0)
            self._settle()
        self.dirty = False
        for flat in self.engine.flats:
            for index, hooks in flat.post_hooks.items():
                for hook in list(hooks.values()) if flat.has_grad[index] else ():
                    hook(flat.params[index])

    # --- as the user sees them ----------------------------------------------------------------------

    def get(self, flat: Flat, index: int) -> ShardedGradient | None:
        self.finish()
        return flat.gradient(index)

    def norm(self, gradient: ShardedGradient, order: float, dtype: torch.dtype | None) -> torch.Tensor:
        """The true norm of a present gradient. The first one asked for costs one collective for all of them."""
        flat, index = gradient.flat, gradient.index
        if gradient.buffer is not flat.grad:  # kept from before a zero_grad
            return norms_of([gradient], order, dtype)[0]
        generation, known = self._norms.get((order, dtype), (-1, {}))
        if generation != self.generation:
            present = [(f, i) for f in self.engine.flats for i, has in enumerate(f.has_grad) if has]
            norms = norms_of([cast("ShardedGradient", f.gradient(i)) for f, i in present], order, dtype)
            known = {(f.index, i): norm for (f, i), norm in zip(present, norms.unbind(), strict=True)}
            self._norms[order, dtype] = self.generation, known
        return known[flat.index, index]

    def set(self, flat: Flat, index: int, value: torch.Tensor | None) -> None:
        self.finish()
        self.generation += 1
        if value is None:
            flat.clear_gradient(index)
            return
        if isinstance(value, ShardedGradient) and value.flat is flat and value.buffer is flat.grad:
            return
        whole = value.whole() if isinstance(value, ShardedTensor) else value
        first, last = flat.range_in_parameter(index)
        with torch.no_grad():
            grad = flat.own_gradient()
            flat.local_of(grad, index).view(-1).copy_(whole.reshape(-1)[first:last])
        flat.has_grad[index] = True

    @staticmethod
    def add_hook(hooks: dict[int, dict[int, Any]], index: int, hook: Any) -> RemovableHandle:
        """Register a gradient hook of a parameter. Returns a handle with `remove()`."""
        handle = RemovableHandle(hooks.setdefault(index, OrderedDict()))
        hooks[index][handle.id] = hook
        return handle

    # --- small and synchronous ----------------------------------------------------------------------

    def mean(self, flat: Flat, whole: torch.Tensor) -> torch.Tensor:
        """The mean over ranks of a whole-sized buffer: this rank's part (all of it where nothing is sharded)."""
        if self.comm.size == 1:
            return whole
        start = self.comm.reduce_scatter if self.engine.sharded else self.comm.all_reduce
        return start(whole, 2 * flat.index + 1).wait().clone().div_(self.comm.size)

    def gather(self, flat: Flat, shard: torch.Tensor) -> torch.Tensor:
        """The whole-sized buffer of shard-sized parts."""
        if not self.engine.sharded:
            return shard.clone()
        whole = shard.new_empty(flat.numel)
        return self.comm.gather(whole, shard.detach().contiguous(), 2 * flat.index).wait()

    def gather_slices(self, flat: Flat, index: int, local: torch.Tensor) -> torch.Tensor:
        """One parameter's slices put together, 1-D: each rank adds its slice to zeros."""
        if not self.engine.sharded:
            return local.clone().view(-1)
        with torch.no_grad():
            whole = torch.zeros(flat.numels[index], dtype=local.dtype, device=local.device)
            first, last = flat.range_in_parameter(index)
            whole[first:last] = local
            return self.comm.total(whole)


def _call_hooks(flat: Flat, index: int, grad: torch.Tensor | None) -> torch.Tensor | None:
    for hook in flat.gradient_hooks.get(index, {}).values():
        if grad is not None:
            result = hook(grad)
            grad = grad if result is None else result
    return grad
