"""How the rows of a step are distributed."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import Any

from pydantic import BaseModel

from shardproof.errors import ConfigError

DEFAULT_MICRO_BATCH = 2


class Batch(BaseModel):
    """How the rows of one optimizer step are distributed: to processes, or to groups of `sequence` processes that share
    rows."""

    micro: int
    accumulation: int
    world_size: int
    sequence: int = 1
    unit: str = "rows"

    @property
    def readers(self) -> int:
        """How many processes, or groups that share rows, read rows of their own."""
        return self.world_size // self.sequence

    @property
    def whole(self) -> int:
        return self.micro * self.accumulation * self.readers

    def fits(self, world_size: int) -> bool:
        """Whether this number of processes makes complete groups, each with the same number of rows per step."""
        readers, odd = divmod(world_size, self.sequence)
        return not odd and readers > 0 and self.whole % readers == 0

    def on(self, world_size: int, most: int | None = None) -> Batch:
        """The same rows per step on another number of processes. Micro-batches have at most `most` rows (default: as
        now).

        Raises:
            ConfigError: this number does not divide the rows of a step.
        """
        if not self.fits(world_size):
            groups = f" in groups of {self.sequence}" if self.sequence > 1 else ""
            raise ConfigError(
                f"{self.whole} {self.unit} a step cannot be dealt out evenly to {world_size} processes{groups}."
            )
        share = self.whole // (world_size // self.sequence)
        micro = max(n for n in range(1, (most or self.micro) + 1) if share % n == 0)
        changed = {"micro": micro, "accumulation": share // micro, "world_size": world_size}
        return self.model_copy(update=changed)

    def __str__(self) -> str:
        readers = f"{self.readers} process(es)"
        if self.sequence > 1:
            readers = f"{self.readers} group(s) of {self.sequence} processes that share each row"
        return f"{self.whole} {self.unit} a step = {self.micro} x {self.accumulation} micro-batch(es) x {readers}"


def steps_of(rows: int, whole: int | Fraction, drop_last: bool) -> int:
    """How many steps of `whole` rows an epoch has."""
    return rows // whole if drop_last else -(-rows // whole)


def batch_of(config: Any, world_size: int) -> Batch:
    """The one place where micro-batch, accumulation and processes become a global batch.

    Raises:
        ConfigError: the three options contradict each other, or the processes cannot be split into groups.
    """
    if world_size % (config.shard_group or 1):
        raise ConfigError(
            f"--shard-group {config.shard_group} does not divide the {world_size} processes: each group of"
            f" {config.shard_group} holds a copy of the model."
        )
    sequence = getattr(config, "sequence_parallel", 1)
    if world_size % sequence:
        raise ConfigError(
            f"--sequence-parallel {sequence} does not divide the {world_size} processes: each group of {sequence} "
            "shares its rows."
        )
    readers = world_size // sequence
    deal = partial(Batch, world_size=world_size, sequence=sequence)
    micro, accumulation, whole = (
        config.per_device_batch_size,
        config.gradient_accumulation_steps,
        config.global_batch_size,
    )
    if whole is None:
        return deal(micro=micro or DEFAULT_MICRO_BATCH, accumulation=accumulation or 1)
    if whole % readers:
        groups = f"{readers} groups of processes" if sequence > 1 else f"{readers} processes"
        raise ConfigError(
            f"--global-batch-size {whole} cannot be dealt out evenly to {groups}.\n"
            f"Use a multiple of {readers}, or another --nproc."
        )
    share = whole // readers
    if micro is None:
        if accumulation is not None:
            micro = share // accumulation
        else:
            micro = max(n for n in range(1, DEFAULT_MICRO_BATCH + 1) if share % n == 0)
    accumulation = accumulation or max(share // max(micro, 1), 1)
    if micro * accumulation != share:
        raise ConfigError(
            f"--global-batch-size {whole} is not per-device batch x accumulation x processes"
            f" ({micro} x {accumulation} x {readers}).\nLeave one of these options out to have it computed."
        )
    return deal(micro=micro, accumulation=accumulation)
