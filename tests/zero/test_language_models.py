"""Promise: transformers models, PEFT adapters and `generate` work unchanged and give one process's numbers."""

from __future__ import annotations

import pytest

from distributed.harness import Sharded, parity
from zero.language_models import CASES

STAGES = [0, 1, 2, 3]
ON_FOUR = ["qwen3", "qwen3moe", "qwen3_lora_checkpointing_reentrant", "qwen3_generates_between_steps"]


def check(name: str, stage: int) -> None:
    parity(name, CASES[name], Sharded(stage))


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", CASES)
def test_one_rank_without_a_group_is_bit_equal_to_plain_torch(name, stage):
    check(name, stage)


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [pytest.param(s, marks=pytest.mark.slow) if s in (1, 2) else s for s in STAGES])
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process(run2, name, stage):
    run2(check, name, stage, timeout=180)  # the first one imports transformers


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [pytest.param(s, marks=pytest.mark.slow) if s in (1, 2) else s for s in STAGES])
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_equal_one_process(run4, name, stage):
    run4(check, name, stage, timeout=180)
