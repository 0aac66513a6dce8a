"""Promise: in the place of questions whose answers are all worth the same others are learnt from, and which these are
does not depend on how many ranks there are."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.errors import ConfigError
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.rlhf.resampling import with_others
from shardproof.train.rlhf.variants import check_variant
from train.rlhf.algorithms import prepared_for, series_of

pytestmark = pytest.mark.slow

REWARDS = Path(__file__).with_name("rewards_for_tests.py")


def batch(lengths: list[tuple[int, int]], advantages: list[float]) -> dict[str, Any]:
    """As TRL makes them: questions padded on the left with 9, answers on the right."""
    made: dict[str, Any] = {"advantages": torch.tensor(advantages), "worth": torch.tensor(advantages)[:, None] + 5}
    for name, column in (("prompt", 0), ("completion", 1)):
        longest = max(length[column] for length in lengths)
        masks = torch.tensor([[int(i < length[column]) for i in range(longest)] for length in lengths])
        masks = masks.flip(1) if name == "prompt" else masks
        made[f"{name}_mask"], made[f"{name}_ids"] = masks, torch.where(masks.bool(), masks * 5, 9)
    made["old_per_token_logps"] = made["completion_mask"] * -0.5
    return made | {"num_items_in_batch": made["completion_mask"].sum()}


def test_questions_that_teach_take_the_places_of_those_that_do_not() -> None:
    first = batch([(2, 1), (2, 2), (1, 3), (1, 1)], [0.0, 0.0, 1.0, -1.0])
    second = batch([(4, 2), (4, 5), (3, 1), (3, 1)], [1.0, -1.0, 0.5, -0.5])
    asked = iter([["second"], ["third"]])
    made = with_others(first, 2, asked, lambda asked: second, list, 0, 9)
    assert made["advantages"].tolist() == [1.0, -1.0, 1.0, -1.0]
    assert made["prompt_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 1]]
    assert made["prompt_ids"].tolist() == [[5, 5, 5, 5], [5, 5, 5, 5], [9, 9, 9, 5], [9, 9, 9, 5]]
    assert made["completion_mask"].sum(1).tolist() == [2, 5, 3, 1]
    assert made["completion_ids"][0].tolist() == [5, 5, 9, 9, 9]
    assert made["old_per_token_logps"][2].tolist() == [-0.5, -0.5, -0.5, 0, 0]
    assert made["num_items_in_batch"] == 11
    assert "worth" not in made
    assert next(asked) == ["third"], "no more is asked than is needed"


def test_where_nothing_teaches_the_batch_stays_as_it_is() -> None:
    idle = batch([(2, 1), (2, 2)], [0.0, 0.0])
    written = []
    made = with_others(idle, 2, iter([[1], [2], [3]]), lambda asked: written.append(asked) or idle, list, 0, 9)
    assert written == [[1], [2], [3]]
    assert all(torch.equal(made[name], value) for name, value in idle.items() if name != "worth")


def options_of(kind: str, model: Path, folder: Path, *more: str) -> list[str]:
    rows = [{"query": f"{kind} {n}?"} for n in range(6) for kind in ("idle", "other")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--rlhf-type", kind, "--model", str(model), "--dataset", str(folder / "rows.jsonl")]
    options += ["--reward-funcs", f"{REWARDS}:by_word", "--num-generations", "2"]
    options += "--max-completion-length 6 --max-steps 3 --global-batch-size 8 --learning-rate 1e-3".split()
    kept = [pair for pair in zip(options[::2], options[1::2], strict=True) if pair[0] not in more]
    return [word for pair in kept for word in pair] + list(more)


@pytest.mark.parametrize(
    "kind, worlds, micro, more",
    [
        ("grpo", (2,), None, ""),
        ("grpo", (2, 4), 2, ""),
        pytest.param("grpo", (2, 4), None, "--beta 0.1 --num-iterations 2", marks=pytest.mark.slow),
        pytest.param("rloo", (2, 4), None, "", marks=pytest.mark.slow),
    ],
)
def test_a_step_has_what_teaches_on_any_number_of_ranks(
    pools: Any, models: dict[str, Path], tmp_path: Path, kind: str, worlds: tuple[int, ...], micro: int, more: str
) -> None:
    """In one micro-batch of each rank, or as many as it takes."""
    series, answers = {}, {}
    for world in (1, *worlds):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        asked = ["--dynamic-sample", "--per-device-batch-size", str(micro or 8 // world), *more.split()]
        prepared = prepared_for(options_of(kind, models["policy"], tmp_path, *asked), world, [{}], folder)
        series[world] = pools.run(world, series_of, prepared, timeout=300.0)[0][0]
        written = [json.loads(line) for line in (folder / "0/completions.jsonl").read_text().splitlines()]
        answers[world] = [row["advantage"] for row in written if row["step"] == 1]
    assert 8 < len(answers[1]) <= 32, "others were asked in place of some"
    assert 0.0 in answers[1]
    for world in worlds:
        assert len(answers[world]) == len(answers[1])
        for one, several in zip(series[1], series[world], strict=True):
            assert several["loss"] == pytest.approx(one["loss"], abs=1e-5)
            assert several["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
    assert series[1][0]["grad_norm"] > 0


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_so_it_is_in_each_step_where_the_distance_to_the_reference_is_a_part_of_rewards(
    pools: Any, models: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """Behind the first step no two answers are then worth the same, and it is rewards that are asked for."""
    more = "--beta 0.1 --learning-rate 1e-2".split() + (["--advantage-estimator", "rloo"] if kind == "grpo" else [])
    answers = {}
    for world in (1, 2):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        asked = ["--dynamic-sample", "--per-device-batch-size", str(8 // world), *more]
        prepared = prepared_for(options_of(kind, models["policy"], tmp_path, *asked), world, [{}], folder)
        pools.run(world, series_of, prepared, timeout=300.0)
        answers[world] = [
            json.loads(line)["step"] for line in (folder / "0/completions.jsonl").read_text().splitlines()
        ]
    assert answers[1] == answers[2]
    assert all(answers[1].count(step) > 8 for step in (1, 2, 3))


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_so_it_is_where_the_mean_of_equal_rewards_is_rounded(
    pools: Any, models: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """In fp32 the mean of eight times 0.8 is another number, and each answer was a little better or worse than it."""
    more = "--num-generations 8 --global-batch-size 16 --per-device-batch-size 16 --max-steps 1 --beta 0".split()
    given = options_of(kind, models["policy"], tmp_path, "--dynamic-sample", "--reward-weights", "1.6", *more)
    ((record, *_),) = pools.run(1, series_of, prepared_for(given, 1, [{}], tmp_path / "run"), timeout=300.0)[0]
    lines = (tmp_path / "run/0/completions.jsonl").read_text().splitlines()
    idle = [row["advantage"] for row in map(json.loads, lines) if sum(row["rewards"].values()) == 0.5]
    assert idle
    assert all(abs(advantage) < 1e-9 for advantage in idle)
    assert len(lines) > 16, "others were asked in place of some"
    assert record["frac_reward_zero_std"] > 0


def test_all_answers_are_written_down_however_rarely_a_run_logs(
    pools: Any, models: dict[str, Path], tmp_path: Path
) -> None:
    """And in how many of its steps answers are written: every two micro-batches, of which a step has three."""
    asked = "--steps-per-generation 2 --per-device-batch-size 2 --logging-steps 2 --global-batch-size 6 --max-steps 4"
    given = options_of("grpo", models["policy"], tmp_path)
    at = [given.index(name) for name in ("--global-batch-size", "--max-steps")]
    given = [word for i, word in enumerate(given) if i not in (*at, *(i + 1 for i in at))]
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    pools.run(1, series_of, prepared_for([*given, *asked.split()], 1, [{}], folder), timeout=300.0)
    written = [json.loads(line)["step"] for line in (folder / "0/completions.jsonl").read_text().splitlines()]
    assert written == [1] * 8 + [2] * 4 + [3] * 8 + [4] * 4


def test_how_often_means_nothing_without_it() -> None:
    options = {"rlhf_type": "grpo", "reward_funcs": ["length"], "max_resample_times": 2}
    with pytest.raises(ConfigError, match="--max-resample-times has no effect without --dynamic-sample"):
        check_variant(RlhfConfig(model="x", dataset=["x"], **options))
