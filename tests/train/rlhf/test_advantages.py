"""Advantages of GRPO beyond TRL's: those that are computed by hand, and the same on any number of ranks."""

from __future__ import annotations

import json
import statistics
from typing import Any
from unittest import mock

import pytest

from shardproof.errors import ConfigError
from shardproof.report.terminal import describe, sample
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.rlhf.algorithms import check_algorithm
from shardproof.train.rlhf.variants import check_variant
from train.rlhf.algorithms import series_of
from train.rlhf.test_same_losses import ALGORITHMS, CHECKPOINTED, COMMON, SHARED, check

REWARDS = [1.0, 3.0, 2.5, 0.5, 0.0, 0.0, 7.0, 1.0]  # two questions
ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus")


def by_hand(rewards: list[float], answers: int, estimator: str, scale: str) -> list[float]:
    groups = [rewards[i : i + answers] for i in range(0, len(rewards), answers)]
    found = []
    for group in groups:
        for i, reward in enumerate(group):
            others = [*group[:i], *group[i + 1 :]] if estimator == "rloo" else group
            found.append(reward - statistics.mean(others))
    if scale == "none":
        return found
    scaled = found if estimator == "reinforce_plus_plus" else rewards
    if scale == "batch":
        return [one / (statistics.stdev(scaled) + 1e-4) for one in found]
    its = [scaled[i // answers * answers :][:answers] for i in range(len(rewards))]
    return [one / (statistics.stdev(group) + 1e-4) for one, group in zip(found, its, strict=True)]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_are_those_of_the_papers(estimator: str, scale: str) -> None:
    import torch

    from shardproof.train.rlhf.advantages import advantages_of

    found = advantages_of(torch.tensor(REWARDS), 4, estimator, scale)
    assert found.tolist() == pytest.approx(by_hand(REWARDS, 4, estimator, scale), abs=1e-6)
    silent = torch.tensor([1.0, torch.nan, 3.0, torch.nan, 5.0, torch.nan, torch.nan, torch.nan])
    found = advantages_of(silent, 4, estimator, scale).tolist()
    assert [found[i] for i in (1, 3, 4, 5, 6, 7)] == [0.0] * 6, "nobody judged these, or nothing is beside them"
    assert found[2] == -found[0] > 0


def told(prepared: list[Any]) -> list[list[dict[str, Any]]]:
    """Train on this rank; what is written down of answers."""
    series_of(prepared)
    files = [run.folder / "completions.jsonl" for run in prepared]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_answers_have_them_with_the_distance_to_the_reference(rlhf: Any, estimator: str) -> None:
    """Before the first step the reference is the model; then it takes something off, by which means stay 0."""
    shape: dict[str, Any] = {"stage": 0, "per_device_batch_size": 8, "max_steps": 2, "num_generations": 4}
    shape["learning_rate"] = 1e-2
    away = {**shape, "advantage_estimator": estimator, "kl_in_reward": True, "beta": 30.0}
    near = {**away, "beta": 1e-9}
    far, close = rlhf(1, [away, near], *COMMON, *ALGORITHMS["grpo"], find=told)
    scale = RlhfConfig(advantage_estimator=estimator).scaled_by
    for written in (close[:8], far[:8], close[8:]):
        rewards = [sum(row["rewards"].values()) for row in written]
        expected = by_hand(rewards, 4, estimator, scale)
        assert [row["advantage"] for row in written] == pytest.approx(expected, abs=1e-3)
    rewards = [sum(row["rewards"].values()) for row in far[8:]]
    changed = [row["advantage"] for row in far[8:]]
    assert changed != pytest.approx(by_hand(rewards, 4, estimator, scale), abs=1e-2)
    assert sum(changed) == pytest.approx(0.0, abs=1e-3)


VARIANTS: dict[str, dict[str, Any]] = {
    "rloo": {"advantage_estimator": "rloo"},
    "reinforce++": {"advantage_estimator": "reinforce_plus_plus"},
    "grpo": {"kl_in_reward": True, "tuner": "lora", "lora_rank": 4, "num_iterations": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("what", VARIANTS)
def test_the_numbers_are_those_of_one_process(rlhf: Any, what: str) -> None:
    """Of the deviation over all ranks, too."""
    records = check(rlhf, "grpo", [{"stage": 3}, CHECKPOINTED[1], {"stage": 1, **SHARED}], **VARIANTS[what])
    assert records[-1]["kl"] != 0
    check(rlhf, "grpo", [{"stage": 3}], ranks=4, **VARIANTS[what])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kl_in_reward": True}, "--kl-in-reward has no effect without --beta above 0"),
        (
            {"advantage_estimator": "rloo", "trl_arguments": {"multi_objective_aggregation": "normalize_then_sum"}},
            "normalize_then_sum and --advantage-estimator",
        ),
        (
            {"advantage_estimator": "rloo", "beta": 0.1, "trl_arguments": {"use_bias_correction_kl": True}},
            "without --beta above 0 and a distance in the loss",
        ),
    ],
)
def test_what_would_decide_nothing_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_variant(RlhfConfig(rlhf_type="grpo", reward_funcs=["length"], **options))
    check_variant(RlhfConfig(rlhf_type="grpo", reward_funcs=["length"], kl_in_reward=False))


ALONE: dict[str, Any] = {"reward_funcs": []}
TAUGHT: dict[str, dict[str, Any]] = {
    "one answer each": {**ALONE, "num_generations": 1},
    "with rewards": {"teacher_kl_coef": 0.3, "tuner": "lora", "lora_rank": 4},
    "learnt from again": {**ALONE, "num_iterations": 2, "model_stages": {"teacher_model": 0}},
}
BY_OTHER = [*COMMON, *ALGORITHMS["grpo"], "--teacher-model", "MODELS/other"]


@pytest.mark.slow
@pytest.mark.parametrize("what", TAUGHT)
def test_what_a_teacher_says_is_the_same_on_any_number_of_ranks(rlhf: Any, what: str) -> None:
    shape = {"per_device_batch_size": 2, **TAUGHT[what]}
    (one,) = rlhf(1, [{"stage": 0, "gradient_accumulation_steps": 2, **shape}], *BY_OTHER)
    ways = [{**shape, **way} for way in ({"stage": 3}, CHECKPOINTED[1], {"stage": 2, **SHARED})]
    for two in rlhf(2, ways, *BY_OTHER):
        for name in ("loss", "teacher_kl", "grad_norm"):
            mine, one_s = ([r[name] for r in records if name in r] for records in (two, one))
            assert mine == pytest.approx(one_s, rel=2e-4, abs=1e-5), name
    assert all(record["grad_norm"] > 1e-2 for record in one)
    assert one[0]["teacher_kl"] > 1e-3


def test_no_reward_is_told_of_where_only_a_teacher_judges(rlhf: Any) -> None:
    """Nobody gave one: what is told is how far the teacher is."""
    alone = {**ALONE, "num_generations": 1, "per_device_batch_size": 2, "max_steps": 1, "stage": 0}
    ((record, *_),) = rlhf(1, [alone], *BY_OTHER)
    assert not [name for name in record if "reward" in name]
    assert f"teacher KL {record['teacher_kl']:.4f}" in describe(record)
    ((answer, *_),) = rlhf(1, [alone], *BY_OTHER, find=told)
    assert answer["rewards"] == {}
    assert answer["advantage"] != 0, "the mean of those of its tokens"
    assert "worth" not in sample(answer)


def asked(prepared: list[Any]) -> int:
    """Train on this rank; how often the model that is trained was asked without gradients about answers."""
    from shardproof.train.rlhf.advantages import ByDistance

    seen, logps = [], ByDistance._logps

    def note(self: Any, model: Any, batch: Any) -> Any:
        seen.append(model is self.model)
        return logps(self, model, batch)

    with mock.patch.object(ByDistance, "_logps", note):
        series_of(prepared)
    return sum(seen)


@pytest.mark.slow
def test_the_model_is_asked_once_for_a_distance_and_a_teacher(rlhf: Any) -> None:
    shape = {"stage": 0, "per_device_batch_size": 4, "max_steps": 2, "kl_in_reward": True, "beta": 0.1}
    assert rlhf(1, [shape], *BY_OTHER, find=asked) == 2, "once in each step"


@pytest.mark.slow
def test_a_teacher_is_come_nearer_to(rlhf: Any) -> None:
    """And one that is the model itself has nothing to say at first."""
    learns = {**ALONE, "temperature": 1.0, "beta": 0.0, "num_generations": 8, "per_device_batch_size": 96, "stage": 0}
    (near,) = rlhf(1, [{**learns, "max_steps": 12, "learning_rate": 1e-3}], *BY_OTHER)
    distances = [record["teacher_kl"] for record in near if "teacher_kl" in record]
    assert distances[-1] < 0.7 * distances[0]
    (itself,) = rlhf(1, [{**learns, "max_steps": 1}], *BY_OTHER[:-1], "MODELS/policy")
    assert itself[0]["teacher_kl"] == pytest.approx(0, abs=1e-6)
    assert itself[0]["grad_norm"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"use_vllm": True, "lmbda": 0},
            "--use-vllm has no effect without a --lmbda above 0: the student generates no answers",
        ),
        ({"sft_alpha": 0.1, "lmbda": 1}, "--sft-alpha has no effect without a --lmbda below 1"),
    ],
)
def test_what_a_student_that_does_not_write_or_always_does_leaves_idle(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_variant(RlhfConfig(rlhf_type="gkd", teacher_model="t", **options))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_generations": 1, "reward_funcs": ["length"]}, "with a --teacher-model and no rewards"),
        ({"dynamic_sample": True}, "--dynamic-sample and --teacher-model: it uses one advantage per answer"),
        ({"loss_type": ["vespo"]}, "--loss-type vespo and --teacher-model"),
        ({"teacher_model": None, "teacher_kl_coef": 2.0}, "--teacher-kl-coef has no effect without --teacher-model"),
        (
            {"rlhf_type": "rloo", "reward_funcs": ["length"]},
            "--teacher-model does not apply to --rlhf-type rloo; it is for gkd, grpo",
        ),
        ({"advantage_estimator": "rloo"}, "--advantage-estimator has no effect without rewards: only a teacher"),
        ({"scale_rewards": "batch"}, "--scale-rewards has no effect without rewards"),
        ({"beta": 0.1, "kl_in_reward": True, "num_generations": 1}, "so --beta would have no effect"),
        (
            {"best_metric": "eval_reward"},
            "--best-metric eval_reward: evaluations of grpo have no such metric. They have loss, entropy",
        ),
        ({"best_metric": "teacher_kl"}, "metrics other than losses are maximised, so the best would be the farthest"),
        ({"per_device_batch_size": 1, "num_generations": 1}, "Only one answer is generated at once"),
        ({"teacher_model": None}, "needs --reward-funcs or --reward-model or --environments or --teacher-model"),
    ],
)
def test_what_no_teacher_is_for_is_refused(options: dict[str, Any], text: str) -> None:
    given = {"rlhf_type": "grpo", "teacher_model": "t", "num_generations": 2, **options}
    config = RlhfConfig(**{**given, **({"reward_funcs": ["length"]} if "teacher_kl_coef" in options else {})})
    with pytest.raises(ConfigError, match=text):
        check_algorithm(config, config.batch(1))


def test_a_distance_in_the_reward_is_compared_with_others_where_a_teacher_judges() -> None:
    more: dict[str, Any] = {"beta": 0.1, "advantage_estimator": "rloo", "scale_rewards": "batch", "num_generations": 2}
    config = RlhfConfig(rlhf_type="grpo", teacher_model="t", **more)
    check_algorithm(config, config.batch(1))
