"""What stays gathered until the step, as forwards show it.

Nothing is gathered again for backward, so graphs can save the plain views as they are, and torch itself sees when
values have changed since. Where a process holds all values, the buffer stays over the step, too: it is filled again.

[Note: shown again]
There what one forward has shown is shown to the next as well, with its node of the graph: to make both anew is a third
of what a forward costs the host. Such views hold the node, it holds the parameters, and these hold the flat, through
C++, where Python sees no circle. So the model has them, and not the flat; and nobody has them where something leads
from a parameter back to the model: a hook, or what was written on the parameter.

A node is in one graph at a time. Of two, a backward pass of both would run it once, with the sum of their gradients in
the dtype of computing; and a rank that shows anew, for a hook that it has alone, would reduce more often than others.
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
    """Views of what one flat has gathered.

    Attributes:
        buffer: the gathered buffer.
        bases: of each parameter a plain view. What forwards show shares its version, from forward to forward.
        graphs: in how many graphs forwards have put a node that no backward pass has run since.
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
        """What was shown is not to be shown again."""
        self.flat.engine.shown.pop(self.flat.index, None)

    def shown_before(self) -> list[torch.Tensor] | None:
        """What the last forward has shown, if it is what this one would show."""
        flat = self.flat
        views = flat.engine.shown.get(flat.index)
        if views is None or (self.graphs and not in_backward()):
            return None
        if self.buffer is None or address_of(self.buffer) != address_of(flat.gathered):
            self.show_anew()
            return None
        return views

    def look_over(self) -> None:
        """A forward is over: what it did to the views, others shall not see."""
        flat = self.flat
        if flat.engine.sharded:  # none shows them again
            return
        self.graphs += torch.is_grad_enabled() and not in_backward() and any(flat.requires_grad)
        views = flat.engine.shown.get(flat.index)
        if views is not None and not all(map(_untouched, views)):
            self.show_anew()

    def differentiated(self, whole: bool) -> None:
        """A backward pass has run the node of a gather, `whole` where that was of all parameters."""
        self.graphs = max(0, self.graphs - whole)

    def keep(self, shown: list[torch.Tensor]) -> None:
        """What a forward shows, for the next one to show. Of several nodes of one gather, a backward that ended in
        between would leave something for the next."""
        engine = self.flat.engine
        if engine.stands and engine.may_show_again() and len({view.grad_fn for view in shown} - {None}) <= 1:
            engine.shown[self.flat.index] = shown

    @property
    def own_uses(self) -> int:
        """How many views of the buffer are kept here and by the model."""
        return len(self.bases) + len(self.flat.engine.shown.get(self.flat.index, ()))

    def views(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Parameters of what was gathered, to be shown by one forward."""
        flat = self.flat
        same = self.buffer is not None and address_of(self.buffer) == address_of(flat.gathered)
        self.buffer = flat.gathered
        if not same:
            self.show_anew()
            self.bases = [flat.view(self.buffer, i).data for i in range(len(flat.names))]
        return [self.bases[i].detach() for i in indices]

    def to_fill(self) -> torch.Tensor | None:
        """Where the values can be put again, in another dtype than the shard's: the buffer of before, unless somebody
        holds a view of it, and with it the values of before."""
        buffer, flat = self.buffer, self.flat
        if buffer is None or flat.shard.dtype == flat.dtype or buffer.dtype != flat.dtype:
            return None
        own = 2 + self.own_uses  # the buffer itself, and its storage in Python
        return buffer if storage_uses(buffer.untyped_storage()) <= own else None

    def uses_of(self, memory: torch.Tensor) -> int:
        """How often this refers to the storage of a tensor, beside the gathered buffer."""
        if self.buffer is None or address_of(self.buffer) != address_of(memory):
            return 0
        return self.own_uses + (self.buffer is not self.flat.whole)

    def value(self, index: int) -> torch.Tensor:
        """A parameter of what was gathered, outside of graphs. Where that is the shard, an edit of it is one of the
        parameter at once, of which those that have saved it are to know; else it is taken in later."""
        flat = self.flat
        stays = flat.whole is flat.shard and flat.whole is self.buffer
        return self.bases[index].detach() if stays else flat.view(flat.gathered, index)

    def changed(self, indices: Sequence[int]) -> None:
        """The values of these parameters are others: torch shall refuse to differentiate what has saved them."""
        self.graphs = 0
        held: list[torch.Tensor] = [self.flat.params[i] for i in indices]
        if self.bases:
            held += [self.bases[i] for i in indices]
        torch.autograd.graph.increment_version(held)


def _untouched(view: torch.Tensor) -> bool:
    """Whether nobody has done to a view what a new one would not have."""
    return view._backward_hooks is None and not view.retains_grad
