"""Accumulated: the gradients of a flat, from what one use contributes to what the user sees."""

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
    """What a flat knows of gradients. The flat has the values: `shard` and where it lives.

    Attributes:
        grad: the reduced gradient of `shard`, same shape and dtype, or None; `grad_locals`: this rank's slices of it.
        has_grad: which parameters have one, on all ranks alike. `cleared`: of which others the buffer still has
            something.
        gradients: for each parameter what `p.grad` returned last, for the next time. `spare`: by parameter and dtype,
            those that nobody else holds any more: to make one takes the host as long as a small kernel. `parting`:
            those that somebody may hold of parameters that were cleared. `plain`: of a buffer that is part of a graph,
            which gradients were taken out of it.
        grad_dtype: in which contributions are added up and reduced.
        partial: contributions of this rank that are not reduced yet, whole size, or None; `written` says of which
            parameters, `places` where.
        used: which parameters got a contribution on this rank since ranks last agreed on that. `grown`: of those with
            post-accumulate-grad hooks, which got one on any rank and are still to be told of it.
        gradient_hooks, post_hooks: by parameter, as torch registers them.
        captured: inside `torch.autograd.grad`, which parameters got a gradient; else None.
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
        """As a model is that has seen no backward pass."""
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
        """Add `scale` times whole gradients of this rank, by index, to what is not reduced yet."""
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
        """The contributions of this rank so far, of the whole size; new ones start anew."""
        partial = cast("torch.Tensor", self.partial)
        self.zero_rest(partial, self.written)
        self.partial, self.places, self.written = None, [], set()
        return partial

    def keep_partial(self) -> None:
        """Of one rank alone: what it has contributed is the gradient, or is added to it."""
        places, partial = self.places, self.take_partial()
        self.add_gradient(partial)
        if self.grad is partial:
            self._grad_locals = places

    def clear_gradient(self, index: int) -> None:
        """`p.grad = None`. The last one to go takes the buffer with it."""
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
        """The gradient buffer to write into. Ranges whose gradient was set to None start from zero; who holds such a
        gradient keeps it as it was, and who holds another of the buffer sees what is written."""
        if self.grad is None:
            self.grad = self.settled(torch.zeros_like(self.shard), self.shard.dtype)
        elif self.cleared:
            if self.grad.requires_grad:  # part of a graph, in which nothing is overwritten
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
        """This rank's slice of a gradient that lies in `buffer`, that of now or one of before."""
        if self.home is not None:
            self.home.settle()
        return self.grad_locals[index] if buffer is self.grad else self.local_of(buffer, index)

    def give_gradient(self, index: int, part: torch.Tensor) -> None:
        """`p.grad = ...`, of which this rank has `part`. Who holds the gradient of before keeps its values."""
        self.engine.copies.take_in_gradients()
        known, self.gradients[index] = self.gradients[index], None
        if known is not None and known.buffer is self.grad:
            if _is_ours_alone(known):
                self.gradients[index] = known
            elif known.buffer.requires_grad:
                self.grad = known.buffer.clone()  # the graph goes on for the others
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
        """`p.grad.detach_()`. The last one to leave takes the buffer with it."""
        buffer = gradient.buffer
        if not buffer.requires_grad:
            return
        if buffer is not self.grad:  # of before
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
        """Give a gradient of before a memory of its own."""
        held.own = held.buffer = self.slice_in(held.buffer, held.index).clone()

    def add_gradient(self, reduced: torch.Tensor) -> None:
        """Add a reduced, shard-sized gradient, which may be kept."""
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
        """The gradients are others now; whole copies of them are stale."""
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
    """Whether but for the caller's variable nobody holds it, has a weak reference to it or has set something on it."""
    unheld = _holders(gradient) == _NOBODY_ELSE and weakref.getweakrefcount(gradient) == 0
    return unheld and len(gradient.__dict__) == _OWN


def _holders(known: Any) -> int:
    return sys.getrefcount(known)


def _holders_of_new() -> int:
    """As many as a gradient has in `_is_ours_alone` that nobody else holds: of a variable, through two calls. A call
    holds more or less of its arguments from one version of Python to another."""
    known = object()

    def called(gradient: Any) -> int:
        return _holders(gradient)

    return called(known)


_NOBODY_ELSE = _holders_of_new()
