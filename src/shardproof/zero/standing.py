"""What stays gathered from step to step, where a process holds all values of the parameters.

There nothing is dropped to save memory, so the gathered buffer can stay where it is, and with it the plain views of it
that graphs save. Torch itself then sees when their values have changed since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardproof.zero.device import storage_uses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardproof.zero.flat import Flat


class Standing:
    """The buffer of one flat that stays.

    Attributes:
        buffer: the gathered buffer; `uses`: of its storage, as long as no forward has shown it.
        bases: of each parameter a plain view. What forwards show shares its version, from forward to forward.
    """

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.forget()

    def forget(self) -> None:
        """Let the buffer go."""
        self.buffer: torch.Tensor | None = None
        self.bases: list[torch.Tensor] = []
        self.uses = 0

    def views(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Parameters of what was gathered, to be shown by one forward."""
        flat = self.flat
        if flat.whole is not self.buffer:
            self.buffer = flat.gathered
            self.bases = [flat.view(self.buffer, i).data for i in range(len(flat.names))]
            self.uses = storage_uses(self.buffer.untyped_storage())
        return [self.bases[i].detach() for i in indices]

    def refilled(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`values` in `dtype`: in the buffer of before, unless it is of no use, or somebody holds a view of it, and
        with it the values of before."""
        buffer = self.buffer
        if values.dtype == dtype or buffer is None or buffer.dtype != dtype or buffer.shape != values.shape:
            return values.to(dtype)
        if storage_uses(buffer.untyped_storage()) > self.uses:
            self.forget()
            return values.to(dtype)
        return buffer.copy_(values)

    def changed(self, indices: Sequence[int]) -> None:
        """The values of these parameters are others: torch shall refuse to differentiate what has saved them."""
        held: list[torch.Tensor] = [self.flat.params[i] for i in indices]
        if self.bases:
            held += [self.bases[i] for i in indices]
        torch.autograd.graph.increment_version(held)
