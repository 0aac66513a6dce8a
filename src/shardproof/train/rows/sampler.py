"""Which rows a rank reads: a step consists of the same rows in the same order, whatever the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Sampler

from shardproof.train.options.batch import Batch, steps_of

WINDOW = 50  # steps whose rows are sorted together by length, as in transformers


Chunk = TypeVar("Chunk")


class GlobalBatchSampler(Sampler[list[int]]):
    """Distributes the global batches of an epoch over the ranks.

    An epoch is one permutation of the rows that depends only on seed and epoch; without a seed, the rows in order. Step
    k takes rows k * G to (k + 1) * G of it, where G is the global batch size; micro-batch j of rank r takes its part of
    these, and ranks that share rows take the same. The last step of an epoch is filled up from the start of the
    permutation, or left out with `drop_last`. With `lengths`, one for each row, the rows of a step have similar
    lengths. `told` is called with each epoch that begins, or that a run resumes in.
    """

    def __init__(
        self,
        rows: int,
        batch: Batch,
        rank: int,
        seed: int | None,
        lengths: Sequence[int] | None = None,
        drop_last: bool = False,
        told: Callable[[int], None] | None = None,
    ) -> None:
        self.rows, self.batch, self.reader, self.seed, self.epoch = rows, batch, rank // batch.sequence, seed, 0
        self.steps, self.lengths, self._told = steps_of(rows, batch.whole, drop_last), lengths, told

    def __len__(self) -> int:
        return self.steps * self.batch.accumulation

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if self._told is not None:
            self._told(epoch)

    def rows_of(self, step: int) -> list[int]:
        """The rows of a step, on all ranks; steps count from 1."""
        epoch, step = divmod(step - 1, self.steps)
        return self._permutation(epoch)[step * self.batch.whole : (step + 1) * self.batch.whole]

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(self.rows))
        generator = torch.Generator().manual_seed((self.seed or 0) + 1_000_003 * epoch)
        if self.seed is not None:
            order = torch.randperm(self.rows, generator=generator).tolist()
        order = [order[i % self.rows] for i in range(self.steps * self.batch.whole)]
        if self.lengths is not None:
            order = by_length(order, self.lengths, self.batch.whole, generator)
        return order

    def __iter__(self) -> Iterator[list[int]]:
        order = self._permutation(self.epoch)
        micro, readers = self.batch.micro, self.batch.readers
        for index in range(len(self)):
            start = (index * readers + self.reader) * micro
            yield order[start : start + micro]


def by_length(order: Sequence[int], lengths: Sequence[int], size: int, generator: torch.Generator) -> list[int]:
    """The same rows in steps of `size`, each with rows of similar length, in random order of steps.

    Rows are sorted within windows of `WINDOW` steps, or fewer if there are few, so that different rows meet in each
    epoch. The step with the longest row comes first: if memory does not suffice, the run fails at once.
    """
    steps = len(order) // size
    window = size * max(min(steps // 4, WINDOW), 1)
    by_window = [sorted(order[i : i + window], key=lambda row: -lengths[row]) for i in range(0, len(order), window)]
    in_order = [row for rows in by_window for row in rows]
    drawn = torch.randperm(steps, generator=generator).tolist()
    longest = max(range(steps), key=lambda step: lengths[in_order[step * size]])
    drawn.insert(0, drawn.pop(drawn.index(longest)))
    return [row for step in drawn for row in in_order[step * size : (step + 1) * size]]


class EpochLoader(DataLoader[Any]):
    """A DataLoader that tells its batch sampler which epoch the Trainer is in."""

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.batch_sampler, GlobalBatchSampler):
            self.batch_sampler.set_epoch(epoch)


def eval_batches(chunks: Sequence[Chunk], rank: int, world_size: int) -> list[tuple[Chunk, bool]]:
    """One rank's batches in a pass over the rows, each with whether it counts.

    Every rank gets the same number, so that gathers match: a rank with fewer repeats one that does not count.
    """
    mine = chunks[rank::world_size]
    most = -(-len(chunks) // world_size)
    padding = [(chunks[0], False)] * (most - len(mine))
    return [(chunk, True) for chunk in mine] + padding
