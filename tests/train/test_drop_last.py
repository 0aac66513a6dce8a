"""`--drop-last`: an epoch ends with its last whole step, the same on any number of processes, also when resumed."""

from __future__ import annotations

from collections import Counter

import pytest

from shardproof.train.options.batch import Batch, steps_of
from shardproof.train.rows.sampler import GlobalBatchSampler

pytestmark = pytest.mark.slow


def dealt(rows: int, batch: Batch, epoch: int, lengths: list[int] | None = None) -> list[int]:
    """The rows of an epoch, over all ranks, in their order."""
    ranks = [GlobalBatchSampler(rows, batch, rank, 7, lengths, drop_last=True) for rank in range(batch.world_size)]
    for sampler in ranks:
        sampler.set_epoch(epoch)
    return [row for together in zip(*ranks, strict=True) for part in together for row in part]


@pytest.mark.parametrize("lengths", [None, [*range(100, 123)]])
def test_no_row_is_seen_twice_in_an_epoch_and_others_are_left_out_in_the_next(lengths):
    first, second = (dealt(23, Batch(micro=2, accumulation=2, world_size=2), epoch, lengths) for epoch in (0, 1))
    assert len(first) == len(second) == 16
    assert max(Counter(first).values()) == max(Counter(second).values()) == 1
    assert set(first) != set(second)
    assert dealt(23, Batch(micro=8, accumulation=1, world_size=1), 0, lengths) == first


def test_an_epoch_has_its_whole_steps():
    assert [steps_of(rows, 8, True) for rows in (8, 15, 16, 23)] == [1, 1, 2, 2]
    assert [steps_of(rows, 8, False) for rows in (8, 15, 16, 23)] == [1, 2, 2, 3]


def test_runs_leave_out_what_fills_no_step(commands, sft):
    """23 rows of which a step takes 8: two steps an epoch."""
    two = ["--drop-last", "--max-steps", "none", "--epochs", "2"]
    done = commands(
        [
            ("one", sft("--stage", "0", *two)),
            ("two", sft("--nproc", "2", "--stage", "3", "--save-steps", "3", *two)),
            ("resumed", sft("--resume", "RUNS/two/checkpoint-3", *two)),
            ("otherwise", sft("--resume", "RUNS/two/checkpoint-3")),
            ("nothing", sft("--drop-last", "--global-batch-size", "24")),
        ]
    )
    one, both, resumed = (done[name].series("loss") for name in ("one", "two", "resumed"))
    assert len(one) == 4, done["one"].output
    assert done["one"].series("epoch") == [0.5, 1.0, 1.5, 2.0]
    assert both == pytest.approx(one, abs=1e-5)
    assert resumed == pytest.approx(one[3:], abs=1e-5)
    assert done["otherwise"].code == done["nothing"].code == 2
    assert "drop_last False instead of True" in done["otherwise"].output
    assert "--drop-last leaves all rows out: there are 23, and a step takes 24" in done["nothing"].output
