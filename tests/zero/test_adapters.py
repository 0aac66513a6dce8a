"""Promise: whatever PEFT makes of a model is trained with one process's numbers."""

from __future__ import annotations

import pytest

from distributed.harness import Sharded, parity
from zero.adapters import CASES

FAST = {
    *("osf", "cpt", "vera", "lokr", "ia3", "supertuning", "adamss", "prefixtuning", "adaptionprompt"),
    *("trainable_tokens_tied", "lora_dora", "lora_tokens", "lora_layers_again"),
}


def check(name: str, stage: int) -> None:
    parity(name, CASES[name], Sharded(stage))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(name, stage, marks=() if name in FAST and stage == 3 else pytest.mark.slow)
        for name in CASES
        for stage in (0, 1, 2, 3)
    ],
)
def test_two_ranks_equal_one_process(run2, name, stage):
    run2(check, name, stage, timeout=180)  # the first one imports transformers
