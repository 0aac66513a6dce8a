"""Gradients: what each rank contributes, when it is reduced, and when it is final.

Contributions of this rank, divided by the number of ranks, add up in a whole-sized buffer, `Flat.partial`; a
reduction turns it into a part of `Flat.grad`. Reductions overlap with the backward pass. A gradient becomes final
when it is first looked at (`p.grad`, clipping, the optimizer's step), outside backward. With `deterministic` they
are added pass by pass instead: see passes.py.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from shardproof.errors import EngineError
from shardproof.zero.autograd import ReduceMean, in_backward
from shardproof.zero.ranks.consensus import END
from shardproof.zero.schedule.passes import add_pass, end_pass
from shardproof.zero.tensors.norms import norms_of
from shardproof.zero.tensors.parameter import ShardedGradient, ShardedTensor

if TYPE_CHECKING:
    from shardproof.zero.comm.pending import Pending
    from shardproof.zero.schedule.engine import Engine
    from shardproof.zero.units.flat import Flat

REDUCTIONS_IN_FLIGHT = 1  # besides the buffer that backward fills; a second takes memory for a unit and saves no time


class Gradients:
    """The gradients of one engine.

    Attributes:
        unsent: reductions that wait for their turn; `in_flight`: those under way.
        sync_depth: number of open `no_sync` contexts.
        dirty: whether this rank has contributed since gradients were final.
        final: whether gradients exist and are final on all ranks.
        swept: gradients looked at in the current sweep, `last_look`: the last of them. See `_begins_sweep`.
        updated: whether an optimizer has stepped since the last sweep.
        cleared: whether gradients were set to None since the last end of a step.
        lent: by flat, reductions that this rank took part in only for others. They may belong to a step that this rank
            has not begun, so `zero_grad` must not clear them: they are added when gradients become final.
        end_is_noted: whether autograd will call `end_backward` at the end of the current backward pass.
        generation: number of changes of gradients.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.comm = engine, engine.comm
        self.sync_depth = 0
        self.unsent: deque[tuple[Flat, torch.Tensor, int]] = deque()
        self.in_flight: deque[tuple[Flat, Pending, int]] = deque()
        self.dirty = self.final = False
        self.swept: set[tuple[int, int]] = set()
        self.last_look: Collection[tuple[int, int]] = ()
        self.updated = self.cleared = False
        self.lent: dict[int, tuple[Flat, list[torch.Tensor]]] = {}
        self.end_is_noted = False
        self.generation = 0
        self._norms: dict[Any, tuple[int, dict[tuple[int, int], torch.Tensor]]] = {}

    # --- inside backward --------------------------------------------------------------------------

    def note_backward(self) -> None:
        """Have `end_backward` called at the end of the outermost backward pass that we know of."""
        if not self.end_is_noted:
            self.end_is_noted = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)  # type: ignore[attr-defined]

    def receive(self, flat: Flat, got: list[tuple[int, torch.Tensor]], collected: dict[int, torch.Tensor]) -> None:
        """Take this rank's whole gradients, by parameter. Those that must stay part of a graph are only collected."""
        if flat.gradient_hooks:
            got = [(index, self.hooked(flat, index, grad)) for index, grad in got]
        if flat.captured is not None:
            flat.captured.update(index for index, _ in got)
            collected.update(got)
            return
        if not all(flat.requires_grad):  # frozen since the forward pass: torch gives these no gradient either
            got = [(index, grad) for index, grad in got if flat.requires_grad[index]]
        self.note_backward()
        if self.engine.copies.gradients:  # earlier edits come before this addition
            self.engine.copies.take_in_gradients()
            flat.gradient_changed()
        self.dirty, self.final = True, False
        for index, _ in got:
            flat.used[index] = True
        if torch.is_grad_enabled():  # create_graph=True
            collected.update(got)
        else:
            flat.contribute(got, 1.0 / self.engine.divisor)

    @staticmethod
    def hooked(flat: Flat, index: int, grad: torch.Tensor) -> torch.Tensor:
        """This rank's gradient after the hooks of the parameter."""
        for hook in list(flat.gradient_hooks.get(index, {}).values()):  # one may remove itself
            result = hook(grad)
            if result is not None and result.shape != grad.shape:
                raise EngineError(
                    f"A gradient hook of '{flat.names[index]}' changed the shape of the gradient from "
                    f"{tuple(grad.shape)} to {tuple(result.shape)}."
                )
            grad = grad if result is None else result
        return grad

    def gather_is_over(self, flat: Flat, whole_flat: bool, collected: dict[int, torch.Tensor]) -> torch.Tensor | None:
        """Every use of one gather has contributed. Returns its gradient if `torch.autograd.grad` asks for it."""
        flat.standing.differentiated(whole_flat)
        got = sorted(collected.items())
        collected.clear()  # at once: the node may serve the next pass, too
        in_graph = self._reduce_in_graph(flat, got) if got else None
        if flat.captured is not None:
            return in_graph
        if in_graph is not None:
            flat.add_gradient(in_graph)
        if whole_flat:
            self.engine.used_up(flat)
            late = self.engine.stage == 1 or self.engine.deterministic
            if flat.partial is not None and self.sync_depth == 0 and not late:
                self._reduce(flat)
        return None

    def _reduce_in_graph(self, flat: Flat, got: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
        pieces, end = [], 0
        for index, grad in got:
            pieces += [flat.zeros(flat.offsets[index] - end), grad.reshape(-1).to(flat.shard.dtype)]
            end = flat.offsets[index] + flat.numels[index]
        whole = torch.cat([*pieces, flat.zeros(flat.numel - end)])
        return cast("torch.Tensor", ReduceMean.apply(whole, flat))

    def _reduce(self, flat: Flat) -> None:
        """Start reducing `flat.partial`; finish the oldest reduction when too many are in flight."""
        if self.comm.size == 1:
            flat.keep_partial()
            return
        partial = flat.take_partial()
        operation = 2 * flat.index + 1
        position = self.engine.want(flat, operation)
        self.engine.count_reduction(flat, partial.nbytes)
        self.unsent.append((flat, partial, position))
        if self.engine.may_start(operation, position):
            self.start_next()
        else:
            self.start_what_can()
        if self.engine.sharded or not self.comm.by_hand:  # otherwise the gradient itself is in flight
            while len(self.unsent) > 1:
                self.engine.streams.settle(self.unsent[0][2])
            self._drain(REDUCTIONS_IN_FLIGHT)

    def start_what_can(self) -> None:
        """Start reductions whose turn has come by now, if the group is used by nobody else."""
        if self.unsent and self.comm.by_hand:
            self.engine.streams.advance()

    def start_next(self) -> None:
        """Start the oldest reduction that waits for its turn."""
        flat, partial, position = self.unsent.popleft()
        self.in_flight.append((flat, self.start(flat, partial), position))

    def start(self, flat: Flat, partial: torch.Tensor | None) -> Pending:
        """Start reducing `partial`; None: this rank has nothing to add."""
        engine = self.engine
        if partial is None:
            partial = engine.pool.take(flat.numel, flat.grad_dtype).zero_()
        return self.comm.reduction(partial, engine.sharded, engine.deterministic, engine.tag(2 * flat.index + 1))

    def lend(self, flat: Flat) -> None:
        """Take part in a reduction to which this rank contributes nothing; its result counts for this rank as well.

        Where several ranks hold the same gradient, it is queued: all must add the same results in the same order.
        """
        pending = self.start(flat, None)
        if not self.engine.sharded:
            self.in_flight.append((flat, pending, -1))
        elif self.dirty and self.comm.replicas > 1:  # it belongs to this rank's current step
            self.in_flight.append((flat, pending, -1))
            self._drain(0)
        else:
            self.keep_lent(flat, [self.engine.wait(pending, 2 * flat.index + 1)])

    def keep_lent(self, flat: Flat, reduced: Sequence[torch.Tensor]) -> None:
        """Keep reductions of others for the end of the step, summed already if that gives the same result."""
        _, terms = self.lent.setdefault(flat.index, (flat, []))
        one_order = self.comm.replicas > 1 or self.engine.deterministic
        for part in reduced:
            terms.append(part.clone() if len(reduced) > 1 else part)  # otherwise all of them would be kept alive
            if flat.grad is None or not one_order:
                for term in terms[1:]:
                    terms[0].add_(term)
                del terms[1:]

    def _drain(self, limit: int) -> None:
        while len(self.in_flight) > limit:
            flat, pending, position = self.in_flight.popleft()
            self.engine.streams.settle(position)
            reduced = self.engine.wait(pending, 2 * flat.index + 1)
            if self.comm.replicas > 1:
                self.take_lent(flat)
            flat.add_gradient(reduced)

    def take_lent(self, flat: Flat) -> None:
        """Add the reductions of others that were kept."""
        for term in self.lent.pop(flat.index, (flat, []))[1]:
            flat.add_gradient(term)

    # --- after backward ---------------------------------------------------------------------------

    def end_backward(self) -> None:
        """The backward pass has ended: start reducing what is left."""
        self.end_is_noted = False
        if self.engine.deterministic:
            end_pass(self)
        elif self.sync_depth == 0:
            self._reduce_rest()
        self.engine.backward_is_over()
        if any(flat.post_hooks for flat in self.engine.flats):
            self._finish()

    def lend_pass(self) -> None:
        """Take part in the end of a backward pass of others."""
        add_pass(self, mine=False)

    def _reduce_rest(self) -> None:
        left = [flat for flat in self.engine.flats if flat.partial is not None]
        if left and self.engine.deterministic:  # a backward pass raised an exception
            end_pass(self)
            return
        with torch.inference_mode(False), torch.no_grad():
            for flat in left:
                self._reduce(flat)

    def finish(self) -> None:
        """Make every gradient final, unless they are or a backward pass is under way."""
        if not self.final and not in_backward():
            self._finish()

    def _begins_sweep(self, look: Collection[tuple[int, int]]) -> bool:
        """Whether a look at a gradient begins a new sweep over them.

        [Note: ranks without gradients]
        A rank without a batch contributes no gradient, yet it has to take part when the others finish theirs, and it
        cannot know whether they have any. So every rank finishes whenever it begins a new sweep over the gradients,
        that is, when it looks at one that it has already looked at in the current sweep: `zero_grad` goes through them,
        and so does clipping. Only the first sweep after an update is free: all ranks have just met there.
        """
        if look == self.last_look and self.final:  # `if p.grad is not None: p.grad...`
            return False
        begins = not self.swept or not self.swept.isdisjoint(look)
        if begins:
            self.swept.clear()
        self.swept.update(look)
        self.last_look = look if len(look) == 1 else ()
        return begins

    def _finish(self) -> None:
        self._reduce_rest()
        self.engine.meet(END)
        self.come_to_an_end()
        self.dirty = False
        for flat in self.engine.flats:
            for index, hooks in flat.post_hooks.items():
                if index in flat.grown:
                    flat.grown.discard(index)  # at once: a hook that looks at gradients ends up here again
                    for hook in list(hooks.values()):
                        hook(flat.params[index])

    def come_to_an_end(self) -> None:
        """All ranks are here: add reductions still in flight, and agree on which gradients exist. Outside inference
        mode, as tensors made in it cannot be changed later."""
        with torch.inference_mode(False), torch.no_grad():
            self.comm.words.forget()
            self._drain(0)
            for flat, _ in list(self.lent.values()):
                self.take_lent(flat)
            if self.engine.home is not None:
                self.engine.home.settle()
            self.engine.invariants.end(contributed=self._agree_on_use())

    def _agree_on_use(self) -> bool:
        """A parameter has a gradient if any rank used it. Returns whether any was used since the last end."""
        flats = self.engine.flats
        mine = [2 * u or had for f in flats for u, had in zip(f.used, f.has_grad, strict=True)]
        flags = torch.tensor(mine, device="cpu").long()
        numbers = self.cleared, *self.engine.written.numbers_to_compare()
        cleared_alike, *alike = self.engine.agree(flags, numbers)
        self.engine.written.compare(*alike)
        if not cleared_alike:
            raise self.engine.streams.refusal(
                f"Rank {self.comm.rank} has {'' if self.cleared else 'not '}cleared its gradients since the last step, "
                "and other ranks differ. After an exception on one rank, skip the step on all of them."
            )
        self.cleared = False
        used = iter(flags.tolist())
        for flat in flats:
            agreed = [next(used) for _ in flat.names]
            flat.has_grad = [flag > 0 for flag in agreed]
            flat.grown.update(index for index in flat.post_hooks if agreed[index] == 2)
            flat.used = [False] * len(flat.names)
        self.final = bool(flags.any())
        return bool((flags >= 2).any())

    # --- as the user sees them ----------------------------------------------------------------------

    def get(self, flat: Flat, index: int) -> ShardedGradient | None:
        self.look(((flat.index, index),))
        return flat.gradient(index)

    def look(self, places: Collection[tuple[int, int]]) -> None:
        """Somebody looks at the gradients of these parameters, by flat and index."""
        if self.comm.size == 1 and not self.dirty:  # there is nobody to be there for
            return
        begins = self._begins_sweep(places)
        if (self.dirty or (begins and not self.updated)) and not in_backward():
            self._finish()
        if begins:
            self.updated = False

    def norm(self, gradient: ShardedGradient, order: float, dtype: torch.dtype | None) -> torch.Tensor:
        """The true norm of a present gradient. The first one asked for costs one collective for all of them."""
        flat, index = gradient.flat, gradient.index
        gradient.settle()
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
        if self.dirty:
            self.finish()
        self.generation += 1
        self.engine.copies.note_given(flat, index, value)
        if value is None:
            flat.clear_gradient(index)
            self.cleared = True
            if flat.grad is None and not any(any(f.has_grad) for f in self.engine.flats):
                self.final = False
            return
        same = isinstance(value, ShardedGradient) and value.flat is flat and value.index == index
        if same and cast("ShardedGradient", value).buffer is flat.grad and flat.has_grad[index]:
            return
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"The gradient of '{flat.names[index]}' is a tensor or None, not a {type(value).__name__}.")
        if tuple(value.shape) != flat.shapes[index]:
            raise EngineError(
                f"'{flat.names[index]}' has shape {flat.shapes[index]} and was given a gradient of shape "
                f"{tuple(value.shape)}."
            )
        if value.dtype not in (flat.dtype, flat.shard.dtype):
            raise EngineError(f"'{flat.names[index]}' is {flat.dtype} and was given a gradient in {value.dtype}.")
        if same:  # kept, and put back
            flat.give_gradient(index, cast("ShardedGradient", value).local.reshape(-1).clone())
        else:
            whole = value.whole() if isinstance(value, ShardedTensor) else value
            flat.give_gradient(index, flat.slice_of(whole, index))
        self.engine.written.note((True, flat.index, index), "=", [value])

    def add_hook(self, hooks: dict[int, dict[int, Any]], index: int, hook: Any) -> RemovableHandle:
        """Register a gradient hook of a parameter. Returns a handle with `remove()`."""
        self.engine.forget_shown()
        handle = RemovableHandle(hooks.setdefault(index, OrderedDict()))
        hooks[index][handle.id] = hook
        return handle

    # --- small and synchronous ----------------------------------------------------------------------

    def mean(self, flat: Flat, whole: torch.Tensor) -> torch.Tensor:
        """The mean over ranks of a whole-sized buffer: this rank's part (all of it where nothing is sharded)."""
        if self.comm.size == 1:
            return whole if self.engine.divisor == 1 else whole / self.engine.divisor
        self.engine.meet("differentiate a gradient", (flat.index, 0))
        reduced = self.start(flat, whole).wait()
        if self.engine.deterministic:  # the adding is left to us
            reduced = functools.reduce(torch.add, reduced.unbind())
        return reduced.clone().div_(self.engine.divisor)

    def gather(self, flat: Flat, shard: torch.Tensor) -> torch.Tensor:
        """The whole-sized buffer of shard-sized parts."""
        if not self.engine.sharded:
            return shard.clone()
        self.engine.meet("differentiate a gradient", (flat.index, 0))
        whole = shard.new_empty(flat.numel)
        return self.comm.gather(whole, shard.detach().contiguous(), self.engine.tag(2 * flat.index)).wait()

    def gather_slices(self, flat: Flat, index: int, local: torch.Tensor) -> torch.Tensor:
        """One parameter's slices put together, 1-D: each rank adds its slice to zeros."""
        if not self.engine.sharded:
            return local.reshape(-1).to(self.comm.device, copy=True)
        with torch.no_grad():
            whole = torch.zeros(flat.numels[index], dtype=local.dtype, device=self.comm.device)
            first, last = flat.range_in_parameter(index)
            whole[first:last] = local
            self.engine.meet("collect a gradient", (flat.index, index))
            return self.comm.total(whole, of_shards=True)
