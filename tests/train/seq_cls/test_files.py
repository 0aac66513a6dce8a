"""Promise: classifiers and rerankers of models that see and hear have the losses and measures of one process at every
stage, what they say is what their backbone and head say, and their folders are loaded again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.cli.main import main
from shardproof.errors import ConfigError
from train.seq_cls.test_same_losses import LORA, STAGES

COMMON = "--max-steps 3 --learning-rate 1e-4 --lr-scheduler constant --global-batch-size 4 --workers 0".split()
NAMES = ["--label-names", "red", "grey", "none"]
CHECKPOINTED = [
    {"stage": 3, "gradient_checkpointing": True},
    {"stage": 3, "gradient_checkpointing": True, "checkpointing_reentrant": True},
]
ROWS: list[dict[str, Any]] = [
    {"query": "<image>which is it?", "images": ["a.png"], "label": "red"},
    {"query": "there is nothing to be seen", "label": "none"},
    {"query": "<image> or <image>", "images": ["b.png", "a.png"], "label": "grey"},
    {"query": "<image>is it?", "response": "it is grey", "images": ["b.png"], "label": "grey", "id": 7},
]
HEARD: list[dict[str, Any]] = [{"query": "<audio>who?", "audios": ["a.wav"], "label": "none"}, *ROWS[:3]]
PAIRS: list[dict[str, Any]] = [
    {"query": "stripes", "positive": "<image>", "positive_images": [["a.png"]], "negative": ["no", "neither"]},
    {"query": "<image>which?", "images": ["b.png"], "positive": "that one", "negative": ["this one"]},
    {"query": "no file", "positive": "a text", "negative": ["<image>no"], "negative_images": [["b.png"]]},
]


@pytest.fixture(scope="module")
def rows(media_files: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`seen`, `heard` and `pairs`: 12 or 9 rows each, beside links to the files that they name."""
    folder = tmp_path_factory.mktemp("labelled-files")
    for name in ("a.png", "b.png", "a.wav"):
        (folder / name).write_bytes((media_files / name).read_bytes())
    for name, some in (("seen", ROWS), ("heard", HEARD), ("pairs", PAIRS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some * 3))
    return {name: folder / f"{name}.jsonl" for name in ("seen", "heard", "pairs")}


def check(trained: Any, model: Path, dataset: Path, variants: list[dict[str, Any]], *more: str, **shared: Any) -> Path:
    """Two ranks with micro-batches of 2 rows are to be one process with micro-batches of 4. Returns the latter's run."""
    options = [*COMMON, *(more or NAMES), "--model", str(model), "--dataset", str(dataset)]
    options += ["--val-dataset", str(dataset)]
    whole = {"stage": 0, "per_device_batch_size": 4, **shared}
    ((expected, folder),) = trained(1, [whole], *options)
    many = [{"per_device_batch_size": 2, **variant, **shared} for variant in variants]
    for variant, (got, _) in zip(many, trained(2, many, *options), strict=True):
        for key in ("loss", "grad_norm", "eval_loss", "eval_accuracy", "eval_macro_f1", "eval_mrr"):
            near = {"abs": 1e-5} if "loss" in key else {"rel": 2e-4, "abs": 1e-5}
            mine, one_s = ([record[key] for record in records if key in record] for records in (got, expected))
            assert mine == pytest.approx(one_s, **near), f"{key}: {variant}"
    assert sum("loss" in record for record in expected) == 3
    assert all(record["grad_norm"] > 1e-3 for record in expected if "grad_norm" in record)
    return folder


def test_two_ranks_give_the_losses_of_one_process(trained: Any, tiny_models: Any, rows: Any) -> None:
    check(trained, tiny_models("qwen2_5_vl"), rows["seen"], [STAGES[0], STAGES[3]])


def test_so_does_a_reranker(trained: Any, tiny_models: Any, rows: Any) -> None:
    check(trained, tiny_models("qwen2_5_vl"), rows["pairs"], [STAGES[3]], "--task", "reranker")


@pytest.mark.slow
@pytest.mark.parametrize("shared", [{}, LORA])
def test_at_every_stage_checkpointed_and_with_adapters(trained: Any, tiny_models: Any, rows: Any, shared: Any) -> None:
    check(trained, tiny_models("qwen2_5_vl"), rows["seen"], [*STAGES, *CHECKPOINTED], **shared)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "internvl", "llava", "minicpmv4_6"])
def test_other_families(trained: Any, tiny_models: Any, rows: Any, name: str) -> None:
    check(trained, tiny_models(name), rows["seen"], [STAGES[3]])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_omni_models(trained: Any, tiny_models: Any, rows: Any, name: str) -> None:
    check(trained, tiny_models(name), rows["heard"], [STAGES[0], STAGES[3], *CHECKPOINTED])
    check(trained, tiny_models(name), rows["heard"], [STAGES[2]], **LORA)
