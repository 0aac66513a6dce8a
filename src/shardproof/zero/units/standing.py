"""Gathered buffers that stay until the step, and the views of them that forwards use.

Nothing is gathered again for backward, so graphs can save the plain views directly, and torch itself notices when
values have changed since. Where a process holds all values, the buffer also survives the step: it is refilled.

[Note: shown again]
Such a process reuses the views of one forward in the next, together with their graph node: making both anew takes a
third of the host time of a forward. The views hold the node, the node holds the parameters, and these hold the flat,
through C++, where Python's garbage collector sees no cycle. So the model holds the views, not the flat; and they are
not kept at all where something leads from a parameter back to the model: a hook, or an attribute set on the parameter.

A node is in one graph at a time. If it were in two, a backward pass through both would run it once, with the sum of
their gradients in the compute dtype; and a rank that has to make new views, because of a hook that only it has, would
reduce more often than the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardproof.zero.autograd import in_backward
from shardproof.zero.device import address_of, storage_uses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardproof.zero.units.flat import Flat


class Standing:
    """Views of the gathered buffer of one flat.

    Attributes:
        buffer: the gathered buffer.
        bases: a plain view of each parameter. The views that forwards use share its version counter.
        graphs: number of graphs that hold a node of ours and have not been differentiated yet.
    """

    graphs = 0

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.forget()

    def forget(self) -> None:
        """Let the buffer go."""
        self.buffer: torch.Tensor | None = None
        self.bases: list[torch.Tensor] = []
        self.show_anew()

    def show_anew(self) -> None:
        """Do not reuse the views of the last forward."""
        self.flat.engine.shown.pop(self.flat.index, None)

    def shown_before(self) -> list[torch.Tensor] | None:
        """The views of the last forward, if this one can reuse them."""
        flat = self.flat
        views = flat.engine.shown.get(flat.index)
        if views is None or (self.graphs and not in_backward()):
            return None
        if self.buffer is None or address_of(self.buffer) != address_of(flat.gathered):
            self.show_anew()
            return None
        return views

    def look_over(self) -> None:
        """A forward is over: if it has changed the views, the next one must not see that."""
        flat = self.flat
        if flat.engine.sharded:  # views are not reused
            return
        self.graphs += torch.is_grad_enabled() and not in_backward() and any(flat.requires_grad)
        views = flat.engine.shown.get(flat.index)
        if views is not None and not all(map(_untouched, views)):
            self.show_anew()

    def differentiated(self, whole: bool) -> None:
        """A backward pass has run the node of a gather; `whole`: a gather of all parameters."""
        self.graphs = max(0, self.graphs - whole)

    def keep(self, shown: list[torch.Tensor]) -> None:
        """Keep the views of a forward for the next one. Not if a gather has several nodes: a backward pass that stopped
        between them would leave gradients behind for the next."""
        engine = self.flat.engine
        if engine.stands and engine.may_show_again() and len({view.grad_fn for view in shown} - {None}) <= 1:
            engine.shown[self.flat.index] = shown

    @property
    def own_uses(self) -> int:
        """Number of views of the buffer held here and by the model."""
        return len(self.bases) + len(self.flat.engine.shown.get(self.flat.index, ()))

    def views(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Parameters in the gathered buffer, for one forward."""
        flat = self.flat
        same = self.buffer is not None and address_of(self.buffer) == address_of(flat.gathered)
        self.buffer = flat.gathered
        if not same:
            self.show_anew()
            self.bases = [flat.view(self.buffer, i).data for i in range(len(flat.names))]
        return [self.bases[i].detach() for i in indices]

    def to_fill(self) -> torch.Tensor | None:
        """The previous buffer, if it can be refilled (its dtype differs from the shard's): not if somebody holds a view
        of it, which has to keep the previous values."""
        buffer, flat = self.buffer, self.flat
        if buffer is None or flat.shard.dtype == flat.dtype or buffer.dtype != flat.dtype:
            return None
        own = 2 + self.own_uses  # the buffer itself, and its storage in Python
        return buffer if storage_uses(buffer.untyped_storage()) <= own else None

    def uses_of(self, memory: torch.Tensor) -> int:
        """Number of references held here to the storage of a tensor, not counting the gathered buffer."""
        if self.buffer is None or address_of(self.buffer) != address_of(memory):
            return 0
        return self.own_uses + (self.buffer is not self.flat.whole)

    def value(self, index: int) -> torch.Tensor:
        """A parameter in the gathered buffer, without a graph. If the buffer is the shard itself, an edit changes the
        parameter at once, and graphs that have saved it must notice; otherwise edits are taken over later."""
        flat = self.flat
        stays = flat.whole is flat.shard and flat.whole is self.buffer
        return self.bases[index].detach() if stays else flat.view(flat.gathered, index)

    def changed(self, indices: Sequence[int]) -> None:
        """The values of these parameters have changed: torch must refuse to differentiate graphs that saved them."""
        self.graphs = 0
        held: list[torch.Tensor] = [self.flat.params[i] for i in indices]
        if self.bases:
            held += [self.bases[i] for i in indices]
        torch.autograd.graph.increment_version(held)


def _untouched(view: torch.Tensor) -> bool:
    """Whether a view is as good as a new one."""
    return view._backward_hooks is None and not view.retains_grad
