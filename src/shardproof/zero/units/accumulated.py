"""Accumulated: the gradients of a flat, from the contribution of one use to what the user sees."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, cast

import torch

from shardproof.zero.tensors.parameter import ShardedGradient
from shardproof.zero.units.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardproof.zero.schedule.engine import Engine
    from shardproof.zero.schedule.home import Home
    from shardproof.zero.units.flat import Flat

# The attributes that every gradient has.
_OWN = len(("flat", "index", "buffer"))


class Accumulated(Layout):
    """The gradient side of a flat. The flat itself has the values: `shard` and where it lives.

    Attributes:
        grad: the reduced gradient of `shard`, same shape and dtype, or None; `grad_locals`: this rank's slices of it.
        has_grad: which parameters have one, the same on all ranks. `cleared`: parameters without one whose range of the
            buffer is not zero yet.
        gradients: for each parameter the object that `p.grad` returned last, to return it again. `spare`: by parameter
            and dtype, objects that nobody else holds any more, for reuse: making one takes the host as long as a small
            kernel. `parting`: objects of cleared parameters that somebody may still hold. `plain`: if the buffer is
            part of a graph, the gradients that were detached from it.
        grad_dtype: dtype in which contributions are added up and reduced.
        partial: full-size contributions of this rank that are not reduced yet, or None; `written`: of which parameters,
            `places`: their views.
        used: parameters that got a contribution on this rank since ranks last agreed on that. `grown`: those with
            post-accumulate-grad hooks that got one on any rank, whose hooks are still to be called.
        gradient_hooks, post_hooks: by parameter, as torch registers them.
        captured: inside `torch.autograd.grad`, the parameters that got a gradient; otherwise None.
    """

    engine: Engine
    shard: torch.Tensor
    home: Home | None
    settled: Callable[[torch.Tensor, torch.dtype], torch.Tensor]
    _grad: torch.Tensor | None
    _grad_locals: list[torch.Tensor] | None

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype, parts: int, part: int) -> None:
        super().__init__(shapes, dtype, parts, part)
        self.grad_dtype: torch.dtype = dtype
        self.grad_version = 0
        self.gradient_hooks: dict[int, dict[int, Callable[..., Any]]] = {}
        self.post_hooks: dict[int, dict[int, Callable[..., Any]]] = {}
        self.without_gradients()

    def without_gradients(self) -> None:
        """The state of a model before its first backward pass."""
        self.grad = None
        self.has_grad = [False] * len(self.shapes)
        self.cleared: set[int] = set()
        self.gradients: list[ShardedGradient | None] = [None] * len(self.shapes)
        self.spare: dict[tuple[int, torch.dtype], ShardedGradient] = {}
        self.parting: list[weakref.ref[ShardedGradient]] = []
        self.partial: torch.Tensor | None = None
        self.places: list[torch.Tensor] = []
        self.written: set[int] = set()
        self.used = [False] * len(self.shapes)
        self.grown: set[int] = set()
        self.captured: set[int] | None = None

    @property
    def device(self) -> torch.device:
        """Where shard and gradient live."""
        raise NotImplementedError

    @property
    def grad(self) -> torch.Tensor | None:
        return self._grad

    @grad.setter
    def grad(self, buffer: torch.Tensor | None) -> None:
        self._grad, self._grad_locals = buffer, None
        self.plain: set[int] = set()

    @property
    def grad_locals(self) -> list[torch.Tensor]:
        """This rank's slices of the present gradients."""
        if self._grad_locals is None:
            self._grad_locals = self.locals_of(cast("torch.Tensor", self.grad))
        return self._grad_locals

    def contribute(self, got: list[tuple[int, torch.Tensor]], scale: float) -> None:
        """Add `scale` times whole gradients of this rank, by index, to the contributions that are not reduced yet."""
        if self.partial is None:
            self.partial = self.engine.pool.take(self.numel, self.grad_dtype)
            self.places = self.views(self.partial)
        more = [(index, grad) for index, grad in got if index in self.written]
        new = [(index, grad.to_dense() if grad.is_sparse else grad) for index, grad in got if index not in self.written]
        if more:
            torch._foreach_add_([self.places[i] for i, _ in more], [grad for _, grad in more], alpha=scale)
        if not new:
            return
        places = [self.places[index] for index, _ in new]
        if len(new) == 1 and scale != 1.0 and new[0][1].dtype == self.grad_dtype:
            torch.mul(new[0][1], scale, out=places[0])  # costs what the copy costs
        else:
            torch._foreach_copy_(places, [grad for _, grad in new])
            if scale != 1.0:
                torch._foreach_mul_(places, scale)
        self.written.update(index for index, _ in new)

    def take_partial(self) -> torch.Tensor:
        """The full-size contributions of this rank so far; later ones start from scratch."""
        partial = cast("torch.Tensor", self.partial)
        self.zero_rest(partial, self.written)
        self.partial, self.places, self.written = None, [], set()
        return partial

    def keep_partial(self) -> None:
        """On a single rank: its contributions become the gradient, or are added to it."""
        places, partial = self.places, self.take_partial()
        self.add_gradient(partial)
        if self.grad is partial:
            self._grad_locals = places

    def clear_gradient(self, index: int) -> None:
        """`p.grad = None`. The last one to go frees the buffer."""
        self.has_grad[index] = False
        known, self.gradients[index] = self.gradients[index], None
        if known is not None and _is_ours_alone(known):
            self.spare[index, known.buffer.dtype] = known
            del known.buffer
        elif known is not None:
            self.parting.append(weakref.ref(known))
        if any(self.has_grad):
            self.cleared.add(index)
        else:
            self.grad = None
            self.cleared.clear()
            self.parting.clear()

    def own_gradient(self) -> torch.Tensor:
        """The gradient buffer, for writing. Ranges whose gradient was set to None start from zero; such a gradient that
        somebody still holds keeps its values, and others in the buffer that are held see what is written."""
        if self.grad is None:
            self.grad = self.settled(torch.zeros_like(self.shard), self.shard.dtype)
        elif self.cleared:
            if self.grad.requires_grad:  # part of a graph, whose values must not be overwritten
                self.grad = self.settled(self.grad.detach().clone(), self.shard.dtype)
            for held in (ref() for ref in self.parting):
                if held is not None and held.buffer is self.grad:
                    self._part(held)
            for index in self.cleared:
                self.slice_in(self.grad, index).zero_()
        self.cleared.clear()
        self.parting.clear()
        return self.grad

    def slice_in(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        """This rank's slice of a gradient in `buffer`, the present one or an earlier one."""
        if self.home is not None:
            self.home.settle()
        return self.grad_locals[index] if buffer is self.grad else self.local_of(buffer, index)

    def give_gradient(self, index: int, part: torch.Tensor) -> None:
        """`p.grad = ...`, of which this rank has `part`. A previous gradient that somebody holds keeps its values."""
        self.engine.copies.take_in_gradients()
        known, self.gradients[index] = self.gradients[index], None
        if known is not None and known.buffer is self.grad:
            if _is_ours_alone(known):
                self.gradients[index] = known
            elif known.buffer.requires_grad:
                self.grad = known.buffer.clone()  # the others stay in the graph
            else:
                self._part(known)
        with torch.no_grad():
            self.local_of(self.own_gradient(), index).view(-1).copy_(part)
        self.gradient_changed()
        self.has_grad[index] = True
        if cast("torch.Tensor", self.grad).requires_grad:
            self.leave_graph(cast("ShardedGradient", self.gradient(index)))

    def in_graph(self, buffer: torch.Tensor, index: int) -> bool:
        """Whether a gradient that lies in `buffer` is part of a graph."""
        return buffer.requires_grad and not (buffer is self.grad and index in self.plain)

    def leave_graph(self, gradient: ShardedGradient) -> None:
        """`p.grad.detach_()`. When the last one has left, the buffer is detached."""
        buffer = gradient.buffer
        if not buffer.requires_grad:
            return
        if buffer is not self.grad:  # an earlier one
            gradient.buffer = buffer.detach()
            return
        self.plain.add(gradient.index)
        if all(index in self.plain for index, has in enumerate(self.has_grad) if has):
            self.grad = buffer.detach()
            for known in self.gradients:
                if known is not None and known.buffer is buffer:
                    known.buffer = self.grad

    def without_graph(self, gradient: Any) -> Any:
        """`p.grad.detach()`, which sees the same values."""
        if not gradient.buffer.requires_grad:
            return gradient
        return ShardedGradient.of(cast("Flat", self), gradient.index, gradient.buffer.detach())

    def _part(self, held: ShardedGradient) -> None:
        """Give an earlier gradient memory of its own."""
        held.own = held.buffer = self.slice_in(held.buffer, held.index).clone()

    def add_gradient(self, reduced: torch.Tensor) -> None:
        """Add a reduced, shard-sized gradient; may keep the tensor itself."""
        self.engine.copies.take_in_gradients()
        self.gradient_changed()
        if self.grad is None:
            self.grad = self.settled(reduced, self.shard.dtype)
            self.cleared.clear()
            return
        in_graph = self.grad.requires_grad or reduced.requires_grad
        if self.home is not None:
            if not in_graph and not self.cleared:
                self.home.add(self.grad, reduced)
                return
            reduced = reduced.to(self.device)
            self.home.settle()
        grad = self.own_gradient()
        if in_graph:
            self.grad = grad + reduced
        else:
            grad.add_(reduced)

    def gradient_changed(self) -> None:
        """The gradients have changed; whole copies of them are stale."""
        self.grad_version += 1
        self.engine.gradients.generation += 1

    def gradient(self, index: int) -> ShardedGradient | None:
        """`p.grad`: None, or a gradient bound to the present buffer."""
        buffer = self._grad
        if not self.has_grad[index] or buffer is None:
            return None
        known = self.gradients[index]
        if known is None or known.buffer is not buffer:
            known = self.gradients[index] = self._bound_to(buffer, index)
        return known

    def _bound_to(self, buffer: torch.Tensor, index: int) -> ShardedGradient:
        spare = self.spare.pop((index, buffer.dtype), None)
        if spare is None:
            return ShardedGradient.of(cast("Flat", self), index, buffer)
        spare.buffer = buffer
        return spare


def _is_ours_alone(gradient: ShardedGradient) -> bool:
    """Whether nobody but the caller holds it, has a weak reference to it or has set an attribute on it."""
    unheld = _holders(gradient) == _NOBODY_ELSE and weakref.getweakrefcount(gradient) == 0
    return unheld and len(gradient.__dict__) == _OWN


def _holders(known: Any) -> int:
    return sys.getrefcount(known)


def _holders_of_new() -> int:
    """The reference count in `_is_ours_alone` of a gradient that nobody else holds: one variable, passed through two
    calls. How many references a call takes differs between versions of Python."""
    known = object()

    def called(gradient: Any) -> int:
        return _holders(gradient)

    return called(known)


_NOBODY_ELSE = _holders_of_new()
