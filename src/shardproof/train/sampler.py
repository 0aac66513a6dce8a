"""Which rows a rank reads: the same rows make a step, in the same order, whatever the number of processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from shardproof.train.config import Batch


class GlobalBatchSampler(Sampler[list[int]]):
    """Deals the global batches of an epoch out to the ranks.

    An epoch is one permutation of the rows, drawn from seed and epoch alone; without a seed, the rows as they are.
    Step k takes rows k * G to (k + 1) * G of it, G being the global batch; micro-batch j of rank r takes its part of
    these, and ranks that share rows take the same. The last step of an epoch is filled up from the start of the
    permutation.
    """

    def __init__(self, rows: int, batch: Batch, rank: int, seed: int | None) -> None:
        self.rows, self.batch, self.reader, self.seed, self.epoch = rows, batch, rank // batch.sequence, seed, 0
        self.steps = -(-rows // batch.whole)

    def __len__(self) -> int:
        return self.steps * self.batch.accumulation

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.rows))
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed + 1_000_003 * self.epoch)
            order = torch.randperm(self.rows, generator=generator).tolist()
        micro, readers = self.batch.micro, self.batch.readers
        for index in range(len(self)):
            start = (index * readers + self.reader) * micro
            yield [order[(start + i) % self.rows] for i in range(micro)]


class EpochLoader(DataLoader[Any]):
    """A DataLoader that tells its batch sampler which epoch the Trainer is in."""

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.batch_sampler, GlobalBatchSampler):
            self.batch_sampler.set_epoch(epoch)


def eval_batches(rows: int, micro: int, rank: int, world_size: int) -> list[tuple[Sequence[int], bool]]:
    """The batches of one pass over the rows for one rank, each with whether it counts.

    Every rank gets the same number, so that gathers meet: who has fewer repeats one that does not count.
    """
    chunks: list[Sequence[int]] = [range(start, min(start + micro, rows)) for start in range(0, rows, micro)]
    mine = chunks[rank::world_size]
    most = -(-len(chunks) // world_size)
    padding = [(chunks[0], False)] * (most - len(mine))
    return [(chunk, True) for chunk in mine] + padding
