"""How the rows of a step are dealt out."""

from __future__ import annotations

from pydantic import BaseModel

from shardproof.errors import ConfigError


class Batch(BaseModel):
    """How the rows of one optimizer step are dealt out: to processes, or to groups of `sequence` that share rows."""

    micro: int
    accumulation: int
    world_size: int
    sequence: int = 1
    unit: str = "rows"

    @property
    def readers(self) -> int:
        """How many read rows of their own."""
        return self.world_size // self.sequence

    @property
    def whole(self) -> int:
        return self.micro * self.accumulation * self.readers

    def on(self, world_size: int) -> Batch:
        """The same rows in a step on another number of processes, with micro-batches that are no larger.

        Raises:
            ConfigError: it does not divide the rows of a step.
        """
        readers, odd = divmod(world_size, self.sequence)
        share, rest = divmod(self.whole, max(readers, 1))
        if odd or rest or not share:
            groups = f" in groups of {self.sequence}" if self.sequence > 1 else ""
            raise ConfigError(
                f"{self.whole} {self.unit} a step cannot be dealt out evenly to {world_size} processes{groups}."
            )
        micro = max(n for n in range(1, self.micro + 1) if share % n == 0)
        changed = {"micro": micro, "accumulation": share // micro, "world_size": world_size}
        return self.model_copy(update=changed)

    def __str__(self) -> str:
        readers = f"{self.readers} process(es)"
        if self.sequence > 1:
            readers = f"{self.readers} group(s) of {self.sequence} processes that share each row"
        return f"{self.whole} {self.unit} a step = {self.micro} x {self.accumulation} micro-batch(es) x {readers}"
