"""So many positives and negatives of a row are drawn in each pass: the same on any number of processes."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof.cli import sft
from shardproof.data.forms.matches import NEGATIVE, POSITIVE
from shardproof.data.rows import Row
from shardproof.errors import ConfigError
from shardproof.train.checks.contradictions import check_together
from shardproof.train.reranker.drawn import DrawnPairs
from train.reranker.test_same_losses import COMMON, check


def row(number: int, positives: int, negatives: int) -> dict[str, Any]:
    """Pair k has k + 1 tokens, all of them 100 * number + k."""
    many = positives + negatives
    return {
        "input_ids": [100 * number + k for k in range(many) for _ in range(k + 1)],
        "lengths": list(range(1, many + 1)),
        "labels": [1] * positives + [0] * negatives,
        "seconds": list(range(many)),
        "row": Row([], "x", number, {POSITIVE: list("abc"[:positives]), NEGATIVE: list("uvwxyz"[:negatives])}),
    }


ROWS = [row(number, positives, negatives) for number, (positives, negatives) in enumerate([(1, 2), (3, 6), (2, 0)])]


def test_what_is_drawn_stays_together() -> None:
    rows = DrawnPairs(ROWS, 2, 3, seed=1)
    some, few, none = (rows[number] for number in (1, 0, 2))
    assert some["labels"] == [1, 1, 0, 0, 0]
    assert [length - 1 for length in some["lengths"]] == some["seconds"]
    assert some["input_ids"] == [100 + k for k in some["seconds"] for _ in range(k + 1)]
    letters = [*"abc", *"uvwxyz"]
    assert some["row"].extra[POSITIVE] + some["row"].extra[NEGATIVE] == [letters[k] for k in some["seconds"]]
    assert few is ROWS[0]
    assert none is ROWS[2]


def test_each_pass_draws_others_and_the_same_ones_again() -> None:
    rows, again = DrawnPairs(ROWS, 1, 2, seed=1), DrawnPairs(ROWS, 1, 2, seed=1)
    passes = []
    for epoch in range(6):
        rows.set_epoch(epoch)
        again.set_epoch(epoch)
        assert rows[1] == again[1]
        passes.append(tuple(rows[1]["seconds"]))
    assert len({*passes}) > 3
    assert len({place for places in passes for place in places}) > 5


@pytest.mark.slow
@pytest.mark.parametrize("task, model", [("reranker", "encoder"), ("generative_reranker", "asked")])
def test_losses_are_those_of_one_process(trained, task: str, model: str) -> None:
    check(trained, model, [{"stage": 0}, {"stage": 3}], task=task, max_positives=1, max_negatives=1)


@pytest.mark.slow
def test_fewer_are_learnt(trained) -> None:
    options = [*COMMON, "--model", "MODELS/encoder", "--truncation", "right"]
    all_, some = trained(1, [{"stage": 0}, {"stage": 0, "max_negatives": 1}], *options)
    first = [next(record["loss"] for record in records if "loss" in record) for records in (all_, some)]
    assert first[0] != first[1]


def test_other_tasks_have_no_pairs() -> None:
    with pytest.raises(ConfigError, match="--max-negatives applies to rerankers: add --task reranker"):
        check_together(sft.parse(["--task", "embedding", "--max-negatives", "2"])[0])


@pytest.mark.slow
def test_a_run_that_goes_on_draws_what_it_would_have_drawn(commands, models, files) -> None:
    """In its second pass over 21 rows, three steps each."""
    fixed = "--max-steps 6 --global-batch-size 8 --truncation right --output-dir OUT --max-negatives 1".split()
    argv = ["sft", "--task", "reranker", "--model", str(models["encoder"]), "--dataset", str(files["ranked"]), *fixed]
    done = commands([("all", [*argv, "--save-steps", "4"]), ("on", [*argv, "--resume", "RUNS/all/checkpoint-4"])])
    for run in done.values():
        assert run.code == 0, run.output
    assert done["on"].series("loss") == done["all"].series("loss")[4:]
