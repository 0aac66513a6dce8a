"""Batches by length: a step is of rows of about one length, the same rows on any number of processes."""

from __future__ import annotations

import random
from collections import Counter

import datasets
import pytest
import torch

from shardproof.errors import ConfigError
from shardproof.train.options.config import Batch
from shardproof.train.rows.lengths import lengths_of
from shardproof.train.rows.sampler import EpochLoader, GlobalBatchSampler

ROWS, SEED = 1003, 7
LENGTHS = random.Random(0).choices(range(5, 500), k=ROWS)


def steps(batch: Batch, epoch: int = 0, lengths: list[int] | None = LENGTHS) -> list[list[int]]:
    """The rows of each step, over all ranks and micro-batches in their order."""
    ranks = [GlobalBatchSampler(ROWS, batch, rank, SEED, lengths) for rank in range(batch.world_size)]
    for sampler in ranks:
        sampler.set_epoch(epoch)
    rows = [row for together in zip(*ranks, strict=True) for part in together for row in part]
    return [rows[i : i + batch.whole] for i in range(0, len(rows), batch.whole)]


def padding(found: list[list[int]]) -> float:
    """The share of a batch that is padding, if a step is one batch."""
    filled = sum(max(LENGTHS[i] for i in rows) * len(rows) for rows in found)
    return 1 - sum(LENGTHS[i] for rows in found for i in rows) / filled


def test_every_row_is_seen_once_and_the_last_step_is_filled_up():
    found = steps(Batch(micro=4, accumulation=2, world_size=2))
    counts = Counter(i for rows in found for i in rows)
    assert set(counts) == set(range(ROWS))
    assert [len(rows) for rows in found] == [16] * 63
    assert sum(counts.values()) - ROWS == 63 * 16 - ROWS
    assert max(counts.values()) == 2


def test_any_number_of_processes_makes_the_same_steps():
    one = steps(Batch(micro=16, accumulation=1, world_size=1))
    assert steps(Batch(micro=4, accumulation=2, world_size=2)) == one
    assert steps(Batch(micro=1, accumulation=4, world_size=4)) == one
    assert steps(Batch(micro=16, accumulation=1, world_size=1), epoch=1) != one


def test_there_is_less_padding_and_the_longest_row_comes_first():
    batch = Batch(micro=16, accumulation=1, world_size=1)
    assert padding(steps(batch, lengths=None)) > 0.4
    for epoch in range(2):
        found = steps(batch, epoch)
        assert padding(found) < 0.1
        assert max(LENGTHS[i] for i in found[0]) == max(LENGTHS)
        means = [sum(LENGTHS[i] for i in rows) for rows in found[1:]]
        assert means != sorted(means, reverse=True)


@pytest.mark.parametrize("rows", [1, 2, 3, 17])
def test_few_rows_fill_a_step(rows):
    sampler = GlobalBatchSampler(rows, Batch(micro=4, accumulation=1, world_size=1), 0, 3, list(range(rows)))
    assert {i for step in sampler for i in step} == set(range(rows))


def test_passing_over_batches_finds_the_place_in_the_data():
    from accelerate.data_loader import skip_first_batches

    sampler = GlobalBatchSampler(ROWS, Batch(micro=4, accumulation=1, world_size=2), 1, SEED, LENGTHS)
    loader = EpochLoader(range(ROWS), batch_sampler=sampler, collate_fn=list)
    loader.set_epoch(3)
    assert list(skip_first_batches(loader, 5)) == list(loader)[5:]


def test_lengths_are_those_of_all_texts_of_a_row_in_the_order_of_the_rows():
    columns = {"prompt_ids": [[1], [1, 2]], "chosen_ids": [[3, 4, 5], []], "token_type_ids": [[0], [0]], "n": [1, 2]}
    rows = datasets.Dataset.from_dict(columns)
    assert lengths_of(rows) == [4, 2]
    assert lengths_of(rows.select([1, 0])) == [2, 4]
    with pytest.raises(ConfigError, match="--group-by-length"):
        lengths_of(rows.select_columns(["n"]))


@pytest.mark.slow
def test_runs_have_the_losses_of_one_process_also_when_resumed_on_fewer(commands, sft):
    steps = ["--group-by-length", "--max-steps", "6"]
    done = commands(
        [
            ("one", sft("--nproc", "1", "--stage", "0", *steps)),
            ("two", sft("--nproc", "2", "--stage", "3", "--save-steps", "4", *steps)),
            ("resumed", sft("--nproc", "1", "--stage", "1", "--resume", "RUNS/two/checkpoint-4", *steps)),
            ("ungrouped", sft("--nproc", "1", "--resume", "RUNS/two/checkpoint-4", "--max-steps", "6")),
        ]
    )
    one, two, resumed = (done[name].series("loss") for name in ("one", "two", "resumed"))
    assert two == pytest.approx(one, abs=1e-5)
    assert resumed == pytest.approx(one[4:], abs=1e-5)
    assert done["ungrouped"].code == 2
    assert "group_by_length False instead of True" in done["ungrouped"].output


@pytest.mark.slow
def test_pairs_are_grouped_too(tmp_path, tiny, commands):
    import json

    chance, file = random.Random(0), tmp_path / "pairs.jsonl"
    words = "the a process shard gradient memory weight step rank".split()
    with file.open("w") as out:
        for _ in range(24):
            good, bad = (" ".join(chance.choices(words, k=chance.randint(1, 30))) for _ in range(2))
            out.write(json.dumps({"query": "what?", "response": good, "rejected_response": bad}) + "\n")
    plan = {}
    for name, (n, stage, more) in {"one": (1, 0, ()), "two": (2, 3, ()), "plain": (1, 0, ("no",))}.items():
        argv = ["rlhf", "--rlhf-type", "dpo", "--model", str(tiny), "--dataset", str(file), "--max-steps", "3"]
        argv += ["--global-batch-size", "4", "--per-device-batch-size", "2", "--output-dir", "OUT"]
        plan[name] = [*argv, "--nproc", str(n), "--stage", str(stage), "--group-by-length", *more]
    done = commands(list(plan.items()))
    assert all(run.code == 0 for run in done.values()), [run.output for run in done.values()]
    losses = {name: run.series("loss") for name, run in done.items()}
    assert losses["two"] == pytest.approx(losses["one"], abs=1e-5)
    assert done["plain"].series("tokens") != done["one"].series("tokens")
    assert torch.tensor(losses["one"]).isfinite().all()


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_the_rows_of_a_step_are_those_that_the_ranks_get(lengths: list[int] | None) -> None:
    """In a second epoch, too."""
    batch = Batch(micro=2, accumulation=2, world_size=2)
    ranks = [GlobalBatchSampler(ROWS, batch, rank, SEED, lengths) for rank in range(2)]
    for epoch in range(2):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        parts = [list(sampler) for sampler in ranks]
        for step in range(ranks[0].steps):
            dealt = [row for part in parts for micro in part[2 * step : 2 * step + 2] for row in micro]
            assert sorted(ranks[1].rows_of(1 + epoch * ranks[0].steps + step)) == sorted(dealt)
