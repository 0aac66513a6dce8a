"""The learning-rate schedules have DeepSpeed's values at every step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from shardproof.errors import ConfigError
from shardproof.integrations.deepspeed import schedules
from shardproof.integrations.deepspeed.sections import Named

CASES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2, "warmup_num_steps": 5}),
    ("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_min_lr": [0.0, 1e-3], "warmup_max_lr": [1e-2, 2e-2], "warmup_num_steps": 1}),
    ("WarmupDecayLR", {"total_num_steps": 12, "warmup_num_steps": 5, "warmup_max_lr": 3e-3}),
    ("WarmupDecayLR", {"total_num_steps": 3, "warmup_num_steps": 5, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"total_num_steps": 12, "warmup_num_steps": 5, "warmup_min_ratio": 0.1}),
    ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_type": "linear", "cos_min_ratio": 0.2}),
    ("LRRangeTest", {"lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0}),
    ("LRRangeTest", {"lr_range_test_step_size": 3, "lr_range_test_staircase": True}),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 4}),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-2,
            "cycle_first_step_size": 3,
            "cycle_second_step_size": 5,
            "cycle_first_stair_count": 2,
            "decay_step_size": 2,
            "decay_lr_rate": 0.5,
            "decay_mom_rate": 0.1,
        },
    ),
]


def optimizer() -> torch.optim.Optimizer:
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    return torch.optim.AdamW([{"params": [one]}, {"params": [two], "lr": 5e-3}], lr=1e-2)


def course(made: torch.optim.Optimizer, schedule: Any, steps: int = 20) -> list[tuple[float, ...]]:
    values = []
    for _ in range(steps):
        values.append(tuple(v for group in made.param_groups for v in (float(group["lr"]), *group["betas"])))
        made.step()
        schedule.step()
    return values


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_step_of_a_number_is_that_of_deepspeeds_count(name: str, settings: dict[str, Any]) -> None:
    """DeepSpeed's count is one less than torch's: its first step is number 0."""

    def rates(*numbers: int | None) -> list[list[float]]:
        made = optimizer()
        schedule = getattr(schedules, name)(made, **settings)
        made.step()
        found = []
        for number in numbers:
            schedule.step(number)
            found.append([v for group in made.param_groups for v in (float(group["lr"]), *group["betas"])])
        return found

    counted = rates(*[None] * 8)
    assert rates(*range(8)) == counted
    assert rates(6, 2, None) == [counted[6], counted[2], counted[3]]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_values_are_deepspeeds(name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    theirs = pytest.importorskip("deepspeed.runtime.lr_schedules")
    first, second = optimizer(), optimizer()
    got = course(first, schedules.make(Named(type=name, params=settings), first))
    expected = course(second, getattr(theirs, name)(second, **settings))
    for a, b in zip(got, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-12, abs=1e-15)


def test_the_first_two_steps_have_the_lowest_rate() -> None:
    """DeepSpeed counts from -1. Checked where DeepSpeed is not there, too."""
    made = optimizer()
    schedule = schedules.WarmupLR(made, warmup_min_lr=0.0, warmup_max_lr=1.0, warmup_num_steps=4)
    rates = [values[0] for values in course(made, schedule, 7)]
    assert rates == pytest.approx([0, 0, math.log(2) / math.log(4), math.log(3) / math.log(4), 1, 1, 1])


def test_a_schedule_goes_on_from_its_state() -> None:
    first, second = optimizer(), optimizer()
    settings = {"total_num_steps": 12, "warmup_num_steps": 5}
    schedule = schedules.WarmupCosineLR(first, **settings)
    expected = course(first, schedule, 12)
    resumed = schedules.WarmupCosineLR(second, **settings)
    halfway = schedules.WarmupCosineLR(optimizer(), **settings)
    for _ in range(6):
        halfway.optimizer.step()
        halfway.step()
    resumed.load_state_dict(halfway.state_dict())
    for group, theirs in zip(second.param_groups, halfway.optimizer.param_groups, strict=True):
        group["lr"] = theirs["lr"]
    assert course(second, resumed, 6) == expected[6:]


def test_torchs_own_schedules_are_taken_by_name() -> None:
    made = optimizer()
    schedule = schedules.make(Named(type="StepLR", params={"step_size": 2}), made)
    assert isinstance(schedule, torch.optim.lr_scheduler.StepLR)


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"type": "WarmupLr"}, "Did you mean WarmupLR?"),
        ({"type": "WarmupLR", "params": {"warmup_steps": 5}}, "Did you mean warmup_num_steps?"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}, "which a Trainer fills in"),
        ({"type": "WarmupLR", "params": {"warmup_type": "cosine"}}, "is not 'log' or 'linear'"),
        ({"type": "WarmupDecayLR", "params": {}}, "total_num_steps"),
        (
            {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_first_step_size": 0}},
            "cycle_first_step_size must be above 0",
        ),
    ],
)
def test_what_is_wrong_is_said(section: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("?", r"\?")):
        schedules.make(Named(**section), optimizer())
