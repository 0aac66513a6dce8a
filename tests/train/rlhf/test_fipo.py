"""Promise: tokens weigh by what has become of those behind them, as FIPO's paper says, at every stage."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shardproof.errors import ConfigError
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.rlhf.algorithms import check_algorithm
from shardproof.train.rlhf.fipo import BLOCK, Fipo, discounted
from train.rlhf.test_same_losses import ALGORITHMS, CHECKPOINTED, COMMON, SHARED

MOVED = torch.tensor([[0.1, -0.3, 2.0, 0.2], [0.5, 0.5, -0.5, 9.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])


def test_sums_of_what_stands_behind_are_those_of_a_loop() -> None:
    values = torch.randn(2, 2 * BLOCK + 33, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected, rest = torch.zeros_like(values), torch.zeros(2, dtype=torch.float64)
    for place in reversed(range(values.shape[1])):
        rest = values[:, place] + 0.97 * rest
        expected[:, place] = rest
    assert torch.allclose(discounted(values, 0.97), expected, atol=1e-10)


def test_weights_are_those_of_the_paper() -> None:
    """Half a token further counts half; what is masked, or has moved too far, counts for nobody."""
    open_ended = Fipo(1.0, 0.0, True, 1e9, 5.0).weights(MOVED, torch.ones(2, 1), MASK)
    expected = [[0.1 - 0.15, -0.3, 0.0], [0.5 + 0.25 - 0.125, 0.5 - 0.25, -0.5, 0.0]]
    for found, known in zip(open_ended, expected, strict=True):
        assert found[: len(known)].tolist() == pytest.approx([math.exp(value) for value in known], rel=1e-5)
    clipped = Fipo(1.0, 0.2, False, 1e9, 5.0).weights(MOVED, torch.ones(2, 1), MASK)
    assert (float(clipped.min()), float(clipped.max())) == pytest.approx((0.8, 1.2))
    assert Fipo(1.0, 0.2, True, 1e9, None).weights(MOVED, torch.ones(2, 1), MASK).min() == 1.0
    safe = Fipo(1.0, 0.2, True, 3.0, None).weights(MOVED, torch.tensor([[-1.0], [1.0]]), MASK)
    assert float(safe[0, 2]) == 1.0 < float(safe[1, 0])


MORE: dict[str, Any] = {"per_device_batch_size": 4, "num_iterations": 2, "learning_rate": 5e-3, "max_steps": 4}


@pytest.mark.slow
def test_it_is_the_same_at_every_stage(rlhf: Any) -> None:
    """A generation is a micro-batch: chance deals answers out to several."""
    weighed = {**MORE, "loss_type": ["fipo"], "fipo_clip_range": 5.0, "fipo_clip_high_only": False}
    options = [*COMMON, *ALGORITHMS["grpo"]]
    shared = {**weighed, **SHARED, "gradient_accumulation_steps": 1, "per_device_batch_size": 8}
    plain, zero, *others = rlhf(
        2,
        [{**MORE, "stage": 0}, *({**weighed, **way} for way in ({"stage": 0}, *CHECKPOINTED, {"stage": 2}))],
        *options,
    )
    (one,) = rlhf(1, [{**weighed, "stage": 0, "per_device_batch_size": 8}], *options)
    (parts,) = rlhf(2, [{**shared, "stage": 3}], *options)
    for found in (*others, one, parts):
        for name in ("loss", "grad_norm", "fipo/influence_weight"):
            mine, its = ([r[name] for r in records if name in r] for records in (found, zero))
            assert mine == pytest.approx(its, rel=5e-4, abs=1e-5), name
    weights = [r["fipo/influence_weight"] for r in zero if "loss" in r]
    assert weights[0] == 1.0 != weights[1], "answers are as they were written in the first step that learns from them"
    assert zero[0]["grad_norm"] == pytest.approx(plain[0]["grad_norm"], rel=1e-5)
    assert zero[1]["grad_norm"] != pytest.approx(plain[1]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"num_iterations": 1},
            "each answer is learned from only once, before the model changes. Add --num-iterations 2",
        ),
        ({"loss_type": ["dapo"], "fipo_clip_range": 0.3}, "--fipo-clip-range does not apply to --loss-type dapo"),
        (
            {"fipo_clip_range": 0.0, "fipo_clip_high_only": False},
            "--fipo-clip-high-only has no effect without --fipo-clip-range above 0",
        ),
        ({"teacher_model": "t"}, "--loss-type fipo and --teacher-model"),
        ({"importance_sampling_level": "sequence"}, "--importance-sampling-level does not apply to --loss-type fipo"),
    ],
)
def test_where_it_decides_nothing_it_is_refused(options: dict[str, Any], text: str) -> None:
    given = {"rlhf_type": "grpo", "loss_type": ["fipo"], "num_iterations": 2, "reward_funcs": ["length"], **options}
    config = RlhfConfig(**given)
    with pytest.raises(ConfigError, match=text):
        check_algorithm(config, config.batch(1))
