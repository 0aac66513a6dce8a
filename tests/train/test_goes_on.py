"""What is said of a run that ended too early fits the command that it had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardproof.train.goes_on import way_on, without_checkpoint
from shardproof.train.options.config import SftConfig

NEWEST = Path("out/checkpoint-4")


@pytest.mark.parametrize(
    ("given", "restarted", "said"),
    [
        ({}, False, "when that is fixed, add --resume out to continue"),
        ({"resume": "auto"}, False, "when that is fixed, the same command continues from it"),
        ({"resume": "./out"}, False, "when that is fixed, the same command continues from it"),
        ({"resume": "out/checkpoint-4"}, False, "when that is fixed, the same command continues from it"),
        ({"resume": "out/checkpoint-2"}, False, "use --resume out instead of --resume out/checkpoint-2 to continue"),
        ({"resume": "first"}, False, "use --resume out instead of --resume first to continue"),
        ({"resume": "auto"}, True, "when that is fixed, --resume out continues from it"),
        ({"save_only_model": True}, False, "weights only, so no run can resume from it: shardproof export out/"),
    ],
)
def test_how_it_goes_on(given: dict[str, Any], restarted: bool, said: str) -> None:
    told = way_on(SftConfig(output_dir="out", **given), NEWEST, "when that is fixed, ", restarted)
    assert told.startswith("its newest checkpoint is out/checkpoint-4")
    assert said in told


@pytest.mark.parametrize(
    ("given", "begun", "failed", "said"),
    [
        ({}, None, True, "nothing learned is kept: --save-steps N would have kept it every N steps"),
        ({}, NEWEST, True, "nothing learned since out/checkpoint-4 is kept: --save-steps N would have"),
        ({"nproc": 2}, None, False, "--max-restarts N would have continued automatically"),
        ({"save_steps": 9}, None, True, "nothing learned is kept: no checkpoint was complete yet"),
    ],
)
def test_what_would_have_been_needed(given: dict[str, Any], begun: Path | None, failed: bool, said: str) -> None:
    assert said in without_checkpoint(SftConfig(**given), begun, failed)
