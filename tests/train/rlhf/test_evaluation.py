"""Evaluation counts each row once: a last micro-batch of few rows, and ranks that have none left, change no figure."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from shardproof.errors import ConfigError
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.rlhf.against import check_shared
from shardproof.train.rlhf.algorithms import check_algorithm
from shardproof.train.rlhf.variants import FIGURES
from shardproof.train.watching.report import tells
from train.rlhf.test_same_losses import ALGORITHMS, COMMON

ROWS = {"kto": "judged", "gkd": "chats"}  # 9 of 12, which neither 2 nor 4 divides
BY_ROW = {
    "dpo": ("eval_loss", "eval_rewards/accuracies", "eval_rewards/margins", "eval_logps/chosen"),
    "rm": ("eval_loss", "eval_accuracy", "eval_margin"),
    "kto": ("eval_logps/chosen", "eval_logps/rejected", "eval_rewards/margins"),  # of other rows each
}


def evaluated(rlhf: Any, kind: str, ranks: int, micro: int, **more: Any) -> dict[str, float]:
    options = [*COMMON, *ALGORITHMS[kind], "--val-dataset", f"FILES/{ROWS.get(kind, 'pairs')}.jsonl#9"]
    variant = {"per_device_batch_size": micro, "max_steps": 1, "learning_rate": 0.0, "stage": 3, **more}
    ((*_, record),) = rlhf(ranks, [variant], *options)
    return {name: value for name, value in record.items() if name.startswith("eval_")}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["dpo", "kto", "orpo", "simpo", "cpo", "rm", "gkd"])
def test_two_ranks_say_what_one_says(rlhf, kind: str) -> None:
    one, two = (evaluated(rlhf, kind, ranks, micro=2) for ranks in (1, 2))
    assert len(one) >= (1 if kind == "gkd" else 4)
    assert two == pytest.approx(one, rel=1e-4, abs=1e-5)
    told = {name.removeprefix("eval_") for name in one if tells(name)}
    assert told <= {"loss", *FIGURES[kind]}, "what --best-metric may name"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "kto", "rm", "gkd"])
def test_so_do_two_that_share_rows(rlhf, kind: str) -> None:
    one = evaluated(rlhf, kind, 1, micro=2)
    assert evaluated(rlhf, kind, 2, micro=2, sequence_parallel=2) == pytest.approx(one, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BY_ROW)
def test_means_over_rows_do_not_depend_on_the_micro_batch(rlhf, kind: str) -> None:
    each, four = (evaluated(rlhf, kind, 1, micro) for micro in (2 if kind == "kto" else 1, 4))
    for name in BY_ROW[kind]:
        assert four[name] == pytest.approx(each[name], rel=1e-4, abs=1e-5), name


def test_a_margin_is_told_where_no_micro_batch_has_good_and_bad_answers(
    rlhf, files: dict[str, Path], tmp_path: Path
) -> None:
    """TRL tells one of a micro-batch that has both, and --keep-best --best-metric rewards/margins found none."""
    rows = files["judged"].read_text().splitlines(keepends=True)[:4]
    (tmp_path / "sorted.jsonl").write_text("".join(sorted(rows, key=lambda row: '"label": true' in row)))
    options = [*COMMON, *ALGORITHMS["kto"], "--val-dataset", str(tmp_path / "sorted.jsonl")]
    shape = {"max_steps": 1, "learning_rate": 0.0, "stage": 0}
    found = rlhf(1, [{"per_device_batch_size": micro, **shape} for micro in (2, 4)], *options)
    two, four = (records[-1]["eval_rewards/margins"] for records in found)
    assert two == pytest.approx(four, abs=1e-6)


@pytest.mark.parametrize("when", [{}, {"eval_steps": 1}])
def test_answers_that_are_no_whole_groups_where_they_are_judged(when: dict[str, Any]) -> None:
    """TRL refused them once all ranks were there, or failed when all was learnt, in the evaluation at the end."""
    config = RlhfConfig(rlhf_type="grpo", reward_funcs=["length"], num_generations=4, val_dataset=["v"], **when)
    config = config.model_copy(update={"gradient_accumulation_steps": 4})
    for world, enough in ((1, 4), (2, 2), (3, 4)):
        assert config.batch(world).micro == enough
        check_algorithm(config, config.batch(world))
        given = config.model_copy(update={"per_device_batch_size": 3})
        said = f"(?s)--num-generations 4 does not divide.*--per-device-batch-size {enough} or"
        with pytest.raises(ConfigError, match=said):
            check_algorithm(given, given.batch(world))
        without = given.model_copy(update={"val_dataset": []})
        check_algorithm(without, without.batch(world))


def test_ranks_that_share_rows_write_as_many_answers_each() -> None:
    """Of a group's micro-batches; where no size is given, it is one for which that is so."""
    config = RlhfConfig(rlhf_type="grpo", reward_funcs=["length"], num_generations=4, sequence_parallel=4)
    for world, steps, micro in ((4, 1, 4), (8, 1, 4), (8, 2, 2), (4, 3, 4)):
        asked = config.model_copy(update={"gradient_accumulation_steps": steps})
        assert asked.batch(world).micro == micro
        check_algorithm(asked, asked.batch(world))
    given = config.model_copy(update={"per_device_batch_size": 2})
    with pytest.raises(ConfigError, match=r"cannot share its 2 answers \(2 x 1 micro"):
        check_algorithm(given, given.batch(8))
    with pytest.raises(ConfigError, match=r"2 answers .* 1 group\(s\) of 4 processes\), which --num-generations 4"):
        check_algorithm(given, given.batch(4))
    with pytest.raises(ConfigError, match=r"--sequence-parallel does not apply to --rlhf-type ppo; it is for .*grpo"):
        check_algorithm(given.model_copy(update={"rlhf_type": "ppo"}), given.batch(8))


@pytest.mark.parametrize(("more", "writes"), [({"lmbda": 0.5}, True), ({"seq_kd": True}, True), ({}, False)])
def test_a_group_of_ranks_shares_answers_of_gkd_that_are_there(more: dict[str, Any], writes: bool) -> None:
    config = RlhfConfig(**{"rlhf_type": "gkd", "teacher_model": "t", "lmbda": 0.0, "sequence_parallel": 2, **more})
    with pytest.raises(ConfigError, match="Add --lmbda 0 without --seq-kd") if writes else nullcontext():
        check_shared(config)
