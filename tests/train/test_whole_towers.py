"""LoRA on the language model beside towers that are trained whole (ms-swift's `lora_llm`), named by their parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from shardproof.errors import ConfigError
from shardproof.train.adapters.adding import check_named_parts
from shardproof.train.options.config import SftConfig

pytestmark = pytest.mark.slow

ROWS = [
    {"query": "<image>which digit?", "response": "two and seven", "images": ["a.png"]},
    {"query": "what is said?", "response": "nothing at all"},
    {"query": "<image> or <image>?", "response": "both", "images": ["b.png", "a.png"]},
] * 3
WHOLE = ["--tuner", "lora", "--modules-to-save", "vision", "aligner", "--part-learning-rates", "vision=1e-3"]


@pytest.fixture(scope="module")
def runs(commands, tiny_models, files: Path):
    (files / "towers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    fixed = "--max-steps 3 --global-batch-size 4 --per-device-batch-size 1 --lr-scheduler constant --learning-rate 3e-3"
    argv = ["sft", "--dataset", str(files / "towers.jsonl"), "--output-dir", "OUT", "--workers", "0", *fixed.split()]
    two = [*WHOLE, "--nproc", "2", "--stage", "3", "--gradient-checkpointing"]
    jobs = []
    for kind in ("qwen2_5_vl", "llava"):
        model = ["--model", str(tiny_models(kind))]
        jobs += [(f"{kind} one", [*argv, *model, *WHOLE]), (f"{kind} two", [*argv, *model, *two])]
        jobs += [(f"{kind} merged", ["export", f"RUNS/{kind} two", "OUT"])]
    return commands(jobs)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava"])
def test_towers_are_trained_whole_and_the_language_model_by_adapters(runs, kind: str) -> None:
    one, two, merged = (runs[f"{kind} {name}"] for name in ("one", "two", "merged"))
    for run in (one, two, merged):
        assert run.code == 0, run.output
    assert one.series("loss")[-1] < one.series("loss")[0]
    for key, close in (("loss", {"abs": 2e-5}), ("grad_norm", {"rel": 1e-4})):
        assert two.series(key) == pytest.approx(one.series(key), **close)
    saved = load_file(two.folder / "model" / "adapter_model.safetensors")
    towers = [name for name in saved if "lora_" not in name]
    assert any("visual" in name or "vision" in name for name in towers)
    assert not any("visual" in name or "vision" in name for name in saved if "lora_" in name)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"modules_to_save": ["audio"]}, "--modules-to-save audio: this model has no such part, it has llm"),
        ({"modules_to_save": ["vision"], "freeze": ["vision"]}, "--modules-to-save vision: that part is frozen"),
    ],
)
def test_a_part_that_is_not_there_or_frozen_is_refused(tiny_models, more, said) -> None:
    folder = str(tiny_models("qwen2_5_vl"))
    with pytest.raises(ConfigError, match=said):
        check_named_parts(folder, SftConfig(model=folder, dataset=["x"], tuner="lora", **more))
