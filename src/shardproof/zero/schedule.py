"""When: what each stage keeps, what is prefetched, what is in flight.

    stage  whole parameters live              gradients are reduced                      optimizer state
    0      always                             all-reduce, as backward produces them      whole
    1      from first use until the step      reduce-scatter at the end of backward      shard
    2      from first use until the step      reduce-scatter as backward produces them   shard
    3      around each use                    reduce-scatter as backward produces them   shard

A step makes whole values stale; the next first use gathers them again, so the gather after a step
overlaps with the forward pass instead of standing at the end of the step.
"""

from __future__ import annotations

from collections import deque
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from shardproof.zero.autograd import ReduceMean, SavedTensors, Unshard
from shardproof.zero.collectives import Collectives, Pending
from shardproof.zero.device import BufferPool
from shardproof.zero.parameter import ShardedGradient, ShardedTensor
from shardproof.zero.unit import Flat, Unit

if TYPE_CHECKING:
    from shardproof.zero.build import Builder

GATHERED_UNITS = 2  # beyond the root: the one in use and the one that is prefetched
REDUCTIONS_IN_FLIGHT = 2


@dataclass(frozen=True)
class MixedPrecision:
    """Compute in one dtype, keep masters in float32.

    Attributes:
        compute: dtype of the gathered parameters, and so of the forward and backward pass.
        reduce: dtype in which gradients are added over ranks.

    Masters, gradients after reduction and optimizer state are float32 and live on the shard. Floating-point
    inputs of the model's forward are cast to `compute`; buffers keep their dtype.
    """

    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.float32


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _cast_floats(values: Any, dtype: torch.dtype) -> Any:
    def to_dtype(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return torch.utils._pytree.tree_map(to_dtype, values)


class Engine:
    """Owns the units of one sharded model and decides when they are gathered, released and reduced.

    Attributes:
        sharded: whether ranks hold parts (stage 1 to 3 on several ranks) or everything.
        resident: gathered units other than the root, least recently used first (stage 3 only).
        successor: which use followed which, learned from the last pass; a prediction, never a promise.
        dirty: whether there are gradients that are not final.
    """

    def __init__(
        self, model: nn.Module, stage: int, comm: Collectives, pool: BufferPool, precision: MixedPrecision | None
    ) -> None:
        self.model, self.stage, self.comm, self.pool, self.precision = model, stage, comm, pool, precision
        self.sharded = stage > 0 and comm.size > 1
        self.frugal = stage == 3 and self.sharded
        self.units: list[Unit] = []
        self.builder: Builder | None = None
        self.sync_depth = 0
        self.whole_depth = 0
        self._hook_count = 0
        self._reset_transient()

    def _reset_transient(self) -> None:
        self.storages: dict[int, Flat] = {}
        self.resident: list[Unit] = []
        self.successor: dict[tuple[int, bool], tuple[int, bool]] = {}
        self.current: tuple[int, bool] = (-1, False)
        self.in_flight: deque[tuple[Flat, Pending]] = deque()
        self.agreement: tuple[Pending, list[Flat]] | None = None
        self.dirty = False
        self.end_is_noted = False
        self.peak_bytes = 0

    @property
    def root(self) -> Unit:
        return self.units[0]

    @property
    def flats(self) -> list[Flat]:
        return [flat for unit in self.units for flat in unit.flats]

    def master_dtype(self, dtype: torch.dtype, trainable: bool) -> torch.dtype:
        """Under mixed precision what is trained has a float32 master; the rest stays as it was loaded."""
        if self.precision is None or not trainable or not dtype.is_floating_point:
            return dtype
        return torch.promote_types(dtype, torch.float32)

    def reduce_dtype(self, flat: Flat) -> torch.dtype:
        return flat.shard.dtype if self.precision is None else self.precision.reduce

    # --- forward: a unit opens and closes --------------------------------------------------------

    def open(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        """Gather the unit and put plain tensors in place of its parameters. Returns cast inputs, or None."""
        if self.whole_depth:
            return None
        if unit.depth == 0:
            self.adopt()
        unit.depth += 1
        if unit.depth > 1:
            return None
        try:
            if self.end_is_noted and not in_backward():
                self.end_is_noted = False  # the last backward ended in an exception
            with torch.inference_mode(False), torch.enable_grad():
                self.acquire(unit)
                for flat in unit.flats:
                    flat.open_views = self._plain_views(flat)
            unit.views = [s.flat.open_views[s.index] for s in unit.slots]  # type: ignore[index]
            for slot, view in zip(unit.slots, unit.views, strict=True):
                if slot.module._parameters.get(slot.name) is slot.flat.params[slot.index]:
                    slot.module._parameters[slot.name] = view  # type: ignore[assignment]
            unit.hooked = SavedTensors.push(self)
        except BaseException:
            self._restore(unit)
            raise
        if unit.is_root and self.precision is not None:
            return _cast_floats((args, kwargs), self.precision.compute)
        return None

    def adopt(self) -> None:
        """Shard what was attached to the model since the last look."""
        if self.builder is not None and self.builder.attached and not in_backward():
            self.builder.build()

    def _plain_views(self, flat: Flat) -> list[torch.Tensor]:
        indices = tuple(range(len(flat.names)))
        if any(flat.requires_grad):
            # As a parameter's, requires_grad of these does not depend on the mode of the moment.
            return list(Unshard.apply(flat.leaf, flat, indices))
        return [flat.view(flat.gathered, i).data for i in indices]

    def close(self, unit: Unit) -> None:
        """Put the parameters back; at stage 3 release the unit unless it is needed next."""
        if unit.depth == 0:
            return
        if unit.depth > 1:
            unit.depth -= 1
            return
        if unit.hooked:
            SavedTensors.pop()
        self._keep_edits(unit)
        self._restore(unit)
        if not self.frugal or in_backward():
            return
        if unit.is_root:
            # Its weights are the first that backward asks for and the last that it leaves.
            if not torch.is_grad_enabled():
                self.current = (-1, False)
                self.release(unit)
        elif self.successor.get((unit.index, False)) != (unit.index, True):
            self.release(unit)

    def _restore(self, unit: Unit) -> None:
        for slot, view in zip(unit.slots, unit.views, strict=False):
            if slot.module._parameters.get(slot.name) is view:
                slot.module._parameters[slot.name] = slot.flat.params[slot.index]
        for flat in unit.flats:
            flat.open_views = None
        unit.views, unit.depth, unit.hooked = [], 0, False

    def _keep_edits(self, unit: Unit) -> None:
        """An edit in place of the plain tensors inside forward is an edit of the parameter."""
        for flat in unit.flats:
            for index, view in enumerate(flat.open_views or ()):
                if view._version > 0:
                    self._keep(flat, index)

    def _keep(self, flat: Flat, index: int) -> None:
        first, last = flat.range_in_parameter(index)
        with torch.no_grad():
            edited = flat.view(flat.gathered, index).reshape(-1)[first:last]
            master = flat.locals[index].view(-1)
            # Under mixed precision only what differs is taken over: the rest of the master is finer.
            differs = master.to(edited.dtype) != edited
            master[differs] = edited[differs].to(master.dtype)

    # --- gather and release ----------------------------------------------------------------------

    def acquire(self, unit: Unit) -> None:
        """Make the unit's whole parameters available; start gathering the unit that is expected next."""
        backward = in_backward()
        if backward:
            self.note_backward()
        use = (unit.index, backward)
        new_use = use != self.current and not unit.is_root
        if not new_use and all(f.fresh and f.gathering is None for f in unit.flats):
            return
        with torch.inference_mode(False), torch.no_grad():
            self._touch(unit)
            for flat in unit.flats:
                if not flat.fresh:
                    self._start_gather(flat)
            if new_use:
                self.successor[self.current] = use
                self.current = use
            self._prefetch(self.successor.get(self.current), unit)
            for flat in unit.flats:
                self._finish_gather(flat)

    def _touch(self, unit: Unit) -> None:
        if not self.frugal or unit.is_root:
            return
        if unit in self.resident:
            self.resident.remove(unit)
        self._make_room(unit)
        self.resident.append(unit)

    def _make_room(self, *keep: Unit) -> None:
        for other in list(self.resident):
            if len(self.resident) < GATHERED_UNITS:
                return
            if other.depth == 0 and other not in keep:
                self.release(other)

    def _prefetch(self, use: tuple[int, bool] | None, present: Unit) -> None:
        if use is None or not self.sharded or use[1] != in_backward():
            return
        unit = self.units[use[0]]
        if unit in self.resident or all(f.fresh or f.gathering for f in unit.flats):
            return
        if self.frugal:
            self._make_room(present)
            if len(self.resident) >= GATHERED_UNITS:
                return
            self.resident.append(unit)
        for flat in unit.flats:
            if not flat.fresh and flat.gathering is None:
                self._start_gather(flat)
                flat.prefetched = True

    def _start_gather(self, flat: Flat) -> None:
        self._drop(flat)
        source = flat.shard.to(flat.dtype)
        if self.sharded:
            flat.whole = self.pool.take(flat.numel, flat.dtype)
            self.comm.same_everywhere(f"gather {flat.unit.name}")
            flat.gathering = self.comm.gather(flat.whole, source, tag=2 * flat.index)
            counters = flat.unit.counters
            counters.gathers += 1
            counters.bytes_gathered += flat.numel * flat.dtype.itemsize
            counters.gathered_peak = max(counters.gathered_peak, flat.unit.gathered_bytes)
            self.peak_bytes = max(self.peak_bytes, sum(u.gathered_bytes for u in self.units))
        else:
            flat.whole = source
            flat.whole_edits = source._version
        flat.whole_version = flat.version
        self.storages[flat.whole.untyped_storage().data_ptr()] = flat

    def _finish_gather(self, flat: Flat) -> None:
        if flat.gathering is None:
            return
        flat.gathering.wait()
        flat.gathering = None
        flat.whole_edits = flat.gathered._version
        flat.unit.counters.prefetch_hits += flat.prefetched
        flat.prefetched = False

    def _drop(self, flat: Flat) -> None:
        """Forget the gathered buffer. Whoever still holds a view of it keeps the memory alive."""
        if flat.gathering is not None:
            flat.gathering.wait()  # its messages are under way: the buffer must not be used for others
            flat.gathering, flat.prefetched = None, False
        elif flat.whole is not None and flat.whole is not flat.shard:
            self.absorb_edits(flat)
        if flat.whole is not None:
            self.storages.pop(flat.whole.untyped_storage().data_ptr(), None)
            flat.whole = None

    def absorb_edits(self, flat: Flat) -> None:
        """Take over what was changed through plain views of the gathered buffer (`p.data[i].zero_()`)."""
        if flat.whole is None or flat.gathering or flat.whole is flat.shard or flat.whole._version == flat.whole_edits:
            return
        for index in range(len(flat.names)):
            self._keep(flat, index)
        flat.whole_edits = flat.whole._version

    def fetch(self, flat: Flat) -> None:
        """Gather one flat now, outside the schedule."""
        if not flat.fresh:
            self._start_gather(flat)
        self._finish_gather(flat)

    def forget(self, flat: Flat) -> None:
        """Drop a gathered buffer whose edits were dealt with."""
        if flat.whole is not None:
            flat.whole_edits = flat.whole._version
        self._drop(flat)
        self.resident = [u for u in self.resident if any(f.whole is not None for f in u.flats)]

    def release(self, unit: Unit) -> None:
        if unit in self.resident:
            self.resident.remove(unit)
        if self.sharded:
            for flat in unit.flats:
                self._drop(flat)

    def release_all(self) -> None:
        for unit in self.units:
            if unit.depth == 0:
                self.release(unit)

    def flat_of_storage(self, tensor: torch.Tensor) -> Flat | None:
        """The flat whose gathered buffer `tensor` lies in."""
        if tensor.layout is not torch.strided:
            return None
        return self.storages.get(tensor.untyped_storage().data_ptr())

    def needed_in_backward(self, flat: Flat) -> None:
        """A saved tensor of `flat` is unpacked."""
        if not flat.fresh or flat.gathering is not None or self.current != (flat.unit.index, True):
            self.acquire(flat.unit)

    # --- backward: contributions and reductions --------------------------------------------------

    def note_backward(self) -> None:
        """Have `end_backward` called when the outermost backward that we know of is through."""
        if not self.end_is_noted:
            self.end_is_noted = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def receive(self, flat: Flat, indices: tuple[int, ...], grads: tuple[torch.Tensor | None, ...]) -> Any:
        """Take the whole gradients of this rank for the parameters `indices`, from one gather's backward.

        Returns the reduced gradient where `torch.autograd.grad` asked for it, else None.
        """
        if flat.gradient_hooks:
            grads = tuple(self._call_hooks(flat, i, g) for i, g in zip(indices, grads, strict=True))
        if flat.captured is not None or torch.is_grad_enabled():
            return self._receive_differentiable(flat, indices, grads)
        self.note_backward()
        self.dirty = True
        for index, grad in zip(indices, grads, strict=True):
            flat.used[index] = flat.used[index] or grad is not None
        whole_unit = len(indices) == len(flat.names)
        later = self.sync_depth > 0 or self.stage == 1 or not whole_unit
        if flat.partial is None:
            flat.partial = self.pool.take(flat.numel, flat.grad_dtype)
            flat.fill(flat.partial, indices, grads)
        else:
            for index, grad in zip(indices, grads, strict=True):
                if grad is not None:
                    flat.view(flat.partial, index).add_(grad)
        if self.frugal and whole_unit and flat.unit.depth == 0:
            self.release(flat.unit)
        if not later:
            self._reduce(flat)
        return None

    def _receive_differentiable(self, flat: Flat, indices: tuple[int, ...], grads: Any) -> torch.Tensor | None:
        """Inside `torch.autograd.grad`, or with `create_graph=True`: the gradient is part of a graph itself."""
        pieces, end = [], 0
        for index, grad in zip(indices, grads, strict=True):
            if grad is not None:
                pieces += [flat.shard.new_zeros(flat.offsets[index] - end), grad.reshape(-1).to(flat.shard.dtype)]
                end = flat.offsets[index] + flat.numels[index]
        whole = torch.cat([*pieces, flat.shard.new_zeros(flat.numel - end)])
        reduced = ReduceMean.apply(whole, flat)
        used = [index for index, grad in zip(indices, grads, strict=True) if grad is not None]
        if flat.captured is not None:
            flat.captured.update(used)
            return reduced
        self.note_backward()
        self.dirty = True
        for index in used:
            flat.used[index] = True
        flat.add_gradient(reduced)
        return None

    def _call_hooks(self, flat: Flat, index: int, grad: torch.Tensor | None) -> torch.Tensor | None:
        for hook in flat.gradient_hooks.get(index, {}).values():
            if grad is not None:
                result = hook(grad)
                grad = grad if result is None else result
        return grad

    def _reduce(self, flat: Flat) -> None:
        """Start reducing `flat.partial`; finish the oldest reduction when too many are in flight."""
        partial, flat.partial = cast("torch.Tensor", flat.partial), None
        if self.comm.size == 1:
            flat.add_gradient(partial)
            return
        self.comm.same_everywhere(f"reduce {flat.unit.name}")
        if self.sharded:
            pending = self.comm.reduce_scatter(partial, tag=2 * flat.index + 1)
        else:
            pending = self.comm.all_reduce(partial, tag=2 * flat.index + 1)
        flat.unit.counters.reductions += 1
        flat.unit.counters.bytes_reduced += partial.numel() * partial.element_size() * (1 if self.sharded else 2)
        self.in_flight.append((flat, pending))
        self._drain(REDUCTIONS_IN_FLIGHT)

    def _drain(self, limit: int) -> None:
        while len(self.in_flight) > limit:
            flat, pending = self.in_flight.popleft()
            flat.add_gradient(pending.wait(), 1.0 / self.comm.size)

    def end_backward(self) -> None:
        """The backward pass is through: reduce what is left, and start agreeing on what was used."""
        self.end_is_noted = False
        if self.sync_depth == 0:
            self._flush()
        self.current = (-1, False)
        if self.frugal:
            self.release_all()
        if any(flat.post_hooks for flat in self.flats):
            self.finish(now=True)

    def _flush(self) -> None:
        with torch.no_grad():
            for flat in self.flats:
                if flat.partial is not None:
                    self._reduce(flat)
            self._settle()
            if not self.dirty:
                return
            flats = [f for f in self.flats if any(f.requires_grad) or any(f.used)]
            flags = torch.tensor([u for f in flats for u in f.used], dtype=torch.uint8)
            for flat in flats:
                flat.used = [False] * len(flat.names)
            if self.comm.size == 1 or flags.numel() == 0:
                self.agreement = (Pending([], flags), flats)
            else:
                self.comm.same_everywhere("end of backward")
                self.agreement = (self.comm.agree(flags), flats)

    def _settle(self) -> None:
        """Apply the agreement: a parameter has a gradient if any rank used it."""
        if self.agreement is None:
            return
        pending, flats = self.agreement
        self.agreement = None
        flags = iter(pending.wait().tolist())
        for flat in flats:
            for index in range(len(flat.names)):
                if next(flags):
                    flat.has_grad[index] = True

    def finish(self, now: bool = False) -> None:
        """Make every gradient final: called when one is first looked at, outside backward unless `now`."""
        if not self.dirty or (in_backward() and not now):
            return
        with torch.no_grad():
            if self.agreement is None or any(f.partial is not None for f in self.flats):
                self._flush()
            self._drain(0)
            self._settle()
        self.dirty = False
        for flat in self.flats:
            for index, hooks in flat.post_hooks.items():
                if flat.has_grad[index]:
                    for hook in list(hooks.values()):
                        hook(flat.params[index])

    # --- gradients as the user sees them ---------------------------------------------------------

    def gradient(self, flat: Flat, index: int) -> ShardedGradient | None:
        self.finish()
        return flat.gradient(index)

    def set_gradient(self, flat: Flat, index: int, value: torch.Tensor | None) -> None:
        self.finish()
        if value is None:
            flat.clear_gradient(index)
            return
        if isinstance(value, ShardedGradient) and value.flat is flat and value.buffer is flat.grad:
            return
        whole = value.whole() if isinstance(value, ShardedTensor) else value
        first, last = flat.range_in_parameter(index)
        with torch.no_grad():
            flat._forget_cleared()
            if flat.grad is None:
                flat.grad = torch.zeros_like(flat.shard)
            flat.local_of(flat.grad, index).view(-1).copy_(whole.reshape(-1)[first:last])
        flat.has_grad[index] = True

    def add_hook(self, hooks: dict[int, dict[int, Any]], index: int, hook: Any) -> Any:
        """Register a gradient hook of a parameter. Returns a handle with `remove()`."""
        handle = torch.utils.hooks.RemovableHandle(hooks.setdefault(index, {}))
        hooks[index][handle.id] = hook
        return handle

    # --- the optimizer's step --------------------------------------------------------------------

    def before_step(self) -> None:
        self.adopt()
        self.finish()
        for flat in self.flats:
            self.absorb_edits(flat)

    def after_step(self) -> None:
        """Drop gathered buffers that the step made stale."""
        for flat in self.flats:
            if not flat.fresh and flat.open_views is None:
                self._drop(flat)
        self.resident = [u for u in self.resident if any(f.whole is not None for f in u.flats)]
        self.current = (-1, False)

    # --- small synchronous helpers ---------------------------------------------------------------

    def mean_now(self, flat: Flat, whole: torch.Tensor) -> torch.Tensor:
        """The mean over ranks of a whole-sized buffer: this rank's part (all of it where nothing is sharded)."""
        if self.comm.size == 1:
            return whole
        start = self.comm.reduce_scatter if self.sharded else self.comm.all_reduce
        return start(whole, 2 * flat.index + 1).wait().clone().div_(self.comm.size)

    def gather_now(self, flat: Flat, shard: torch.Tensor) -> torch.Tensor:
        """The whole-sized buffer of shard-sized parts."""
        if not self.sharded:
            return shard.clone()
        whole = shard.new_empty(flat.numel)
        return self.comm.gather(whole, shard.detach().contiguous(), 2 * flat.index).wait()

    def gather_slices(self, flat: Flat, index: int, local: torch.Tensor) -> torch.Tensor:
        """One parameter's slices put together, 1-D: each rank adds its slice to zeros."""
        if not self.sharded:
            return local.clone().view(-1)
        with torch.no_grad():
            whole = torch.zeros(flat.numels[index], dtype=local.dtype, device=local.device)
            first, last = flat.range_in_parameter(index)
            whole[first:last] = local
            return self.comm.total(whole)

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        self.finish()
        self.release_all()
        copy = object.__new__(Engine)
        memo[id(self)] = copy
        copy.__dict__.update(self.__dict__)
        copy._reset_transient()
        copy.pool = deepcopy(self.pool)
        copy.model = deepcopy(self.model, memo)
        copy.units = [deepcopy(u, memo) for u in self.units]
        copy.builder = self.builder and self.builder.for_copy(copy)
        return copy
