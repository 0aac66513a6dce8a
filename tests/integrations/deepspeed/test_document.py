"""docs/moving-from-deepspeed.md: its Python is run, in order, on two processes; its JSON is read."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from shardproof.integrations.deepspeed import config

DOCUMENT = Path(__file__).parents[3] / "docs" / "moving-from-deepspeed.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run_python(folder: str) -> int:
    """Every block in one namespace, as a reader would paste them."""
    from accelerate.state import AcceleratorState, GradientState

    before = os.getcwd()
    os.chdir(folder)
    scope: dict[str, object] = {}
    try:
        for number, block in enumerate(blocks("python"), 1):
            exec(compile(block, f"block {number} of {DOCUMENT.name}", "exec"), scope)
    finally:
        os.chdir(before)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    return number


def test_the_examples_run(run2, tmp_path: Path) -> None:
    assert run2(run_python, str(tmp_path), timeout=240.0) == [len(blocks("python"))] * 2
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step4"
    assert (tmp_path / "export" / "model.bin").is_file()


def test_the_json_is_read() -> None:
    (text,) = blocks("json")
    settings, unused = config.read(json.loads(text))
    assert settings.zero_optimization.stage == 3
    assert unused == ["zero_optimization.overlap_comm", "zero_optimization.reduce_bucket_size"]
