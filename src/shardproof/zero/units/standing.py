"""What stays gathered until the step, as forwards show it.

Nothing is gathered again for backward, so graphs can save the plain views as they are, and torch itself sees when
values have changed since. Where a process holds all values, the buffer stays over the step, too: it is filled again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardproof.zero.device import address_of, storage_uses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardproof.zero.units.flat import Flat


class Standing:
    """Views of what one flat has gathered.

    Attributes:
        buffer: the gathered buffer.
        bases: of each parameter a plain view. What forwards show shares its version, from forward to forward.
    """

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.forget()

    def forget(self) -> None:
        """Let the buffer go."""
        self.buffer: torch.Tensor | None = None
        self.bases: list[torch.Tensor] = []

    def views(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Parameters of what was gathered, to be shown by one forward."""
        flat = self.flat
        same = self.buffer is not None and address_of(self.buffer) == address_of(flat.gathered)
        self.buffer = flat.gathered
        if not same:
            self.bases = [flat.view(self.buffer, i).data for i in range(len(flat.names))]
        return [self.bases[i].detach() for i in indices]

    def to_fill(self) -> torch.Tensor | None:
        """Where the values can be put again, in another dtype than the shard's: the buffer of before, unless somebody
        holds a view of it, and with it the values of before."""
        buffer, flat = self.buffer, self.flat
        if buffer is None or flat.shard.dtype == flat.dtype or buffer.dtype != flat.dtype:
            return None
        own = 2 + len(self.bases)  # the buffer itself, and its storage in Python
        return buffer if storage_uses(buffer.untyped_storage()) <= own else None

    def uses_of(self, memory: torch.Tensor) -> int:
        """How often this refers to the storage of a tensor, beside the gathered buffer."""
        if self.buffer is None or address_of(self.buffer) != address_of(memory):
            return 0
        return len(self.bases) + (self.buffer is not self.flat.whole)

    def value(self, index: int) -> torch.Tensor:
        """A parameter of what was gathered, outside of graphs. Where that is the shard, an edit of it is one of the
        parameter at once, of which those that have saved it are to know; else it is taken in later."""
        flat = self.flat
        stays = flat.whole is flat.shard and flat.whole is self.buffer
        return self.bases[index].detach() if stays else flat.view(flat.gathered, index)

    def changed(self, indices: Sequence[int]) -> None:
        """The values of these parameters are others: torch shall refuse to differentiate what has saved them."""
        held: list[torch.Tensor] = [self.flat.params[i] for i in indices]
        if self.bases:
            held += [self.bases[i] for i in indices]
        torch.autograd.graph.increment_version(held)
