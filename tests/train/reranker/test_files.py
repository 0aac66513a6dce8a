"""Promise: generative rerankers judge pairs with pictures, with the losses of one process, as plain transformers and
sentence-transformers score them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.data.encoding.judged import INSTRUCTION, TASK
from shardproof.data.forms.matches import Matches
from shardproof.data.rows import read_rows
from shardproof.errors import ConfigError, DataError
from shardproof.report.terminal import Silent
from shardproof.train.options.config import SftConfig
from shardproof.train.reranker.ranker import AskedRanker
from shardproof.train.reranker.scoring import scoring_in
from shardproof.train.run import recipe_of

pytestmark = pytest.mark.slow

WORDS = {"true_token_id": 60, "false_token_id": 61}
ROWS: list[dict[str, Any]] = [
    {
        "query": "which one is it?",
        "positive": ["<image>", "<image> and text"],
        "positive_images": [["a.png"], ["b.png"]],
        "negative": ["<image>", "neither"],
        "negative_images": [["c.png"], []],
    },
    {"query": "<image>which?", "images": ["b.png"], "positive": "the one with stripes", "negative": ["no", "nor this"]},
    {"query": "no file", "positive": "a text", "negative": "no"},
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures and `rows.jsonl`, 12 rows."""
    import numpy as np
    from PIL import Image

    folder, chance = tmp_path_factory.mktemp("seen"), np.random.default_rng(0)
    for name, size in (("a.png", (16, 24, 3)), ("b.png", (16, 40, 3)), ("c.png", (32, 24, 3))):
        Image.fromarray(chance.integers(0, 255, size, dtype=np.uint8)).save(folder / name)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS * 4))
    return folder


@pytest.fixture(scope="module")
def answering(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A small model of a kind whose folder says which two of its tokens answer a pair."""

    def folder(kind: str) -> Path:
        made = tmp_path_factory.mktemp("answering") / kind
        shutil.copytree(tiny_models(kind), made)
        (made / "1_LogitScore").mkdir()
        (made / "1_LogitScore" / "config.json").write_text(json.dumps(WORDS))
        return made

    return folder


def check(trained: Any, model: Path, rows: Path, variants: list[dict[str, Any]], **more: Any) -> None:
    """Two ranks with micro-batches of 2 rows are to be one process with micro-batches of 4."""
    options = "--max-steps 3 --learning-rate 1e-3 --eval-steps 3 --workers 0 --model".split()
    shape = {"task": "generative_reranker", "dataset": [str(rows)], "val_dataset": [str(rows)], **more}
    shape |= {"gradient_accumulation_steps": 1}
    (expected,) = trained(1, [{"stage": 0, "per_device_batch_size": 4, **shape}], *options, str(model))
    many = [{"per_device_batch_size": 2, **shape, **variant} for variant in variants]
    for variant, got in zip(many, trained(2, many, *options, str(model)), strict=True):
        for key in ("loss", "grad_norm", "eval_loss", "eval_ndcg"):
            near = {"abs": 1e-5} if "loss" in key else {"rel": 2e-4, "abs": 1e-4}
            mine, one_s = ([record[key] for record in records if key in record] for records in (got, expected))
            assert mine == pytest.approx(one_s, **near), f"{key}: {variant}"
    assert sum("loss" in record for record in expected) == 3
    assert all(record["grad_norm"] > 1e-3 for record in expected if "grad_norm" in record)


def test_two_ranks_give_the_losses_of_one_process(trained: Any, answering: Any, seen: Path) -> None:
    check(trained, answering("qwen2_5_vl"), seen / "rows.jsonl", [{"stage": 3}])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl", "llava", "gemma3", "qwen2_5_omni"])
def test_so_they_do_of_other_families(trained: Any, answering: Any, seen: Path, name: str) -> None:
    variants = [{"stage": 0}, {"stage": 3}, {"stage": 3, "gradient_checkpointing": True}]
    loss = "listwise" if name == "llava" else "pointwise"
    check(trained, answering(name), seen / "rows.jsonl", variants, loss=loss)


@pytest.fixture(scope="module")
def done(commands: Any, answering: Any, seen: Path) -> Any:
    argv = ["sft", "--task", "generative_reranker", "--model", str(answering("llava")), "--max-steps", "2"]
    rows = ["--dataset", str(seen / "rows.jsonl")]
    return commands(
        [
            ("run", [*argv, *rows, "--nproc", "2", "--output-dir", "OUT"]),
            ("scored", ["infer", "RUNS/run", *rows, "--result-path", "OUT.jsonl", "--nproc", "2"]),
            ("exported", ["export", "RUNS/run", "OUT"]),
            ("doctor", ["doctor", *argv[1:5], *rows, "--per-device-batch-size", "2", "--json"]),
        ]
    )


def test_scores_are_those_of_plain_transformers(done: Any, seen: Path) -> None:
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    assert {name: run.code for name, run in done.items() if run.code} == {}, done
    lines = done["scored"].folder.with_name("scored.jsonl").read_text().splitlines()
    scores = [json.loads(line)["scores"] for line in lines]
    assert [len(of_row) for of_row in scores] == [4, 3, 2] * 4
    folder = done["exported"].folder
    assert scoring_in(folder).files == ("image",)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    for place, query, document, file in (
        ((0, 1), "which one is it?", "<image> and text", "b.png"),
        ((0, 3), "which one is it?", "neither", None),
        ((1, 2), "<image>which?", "nor this", "b.png"),
    ):
        text = (
            f"<|im_start|>system\n{TASK}<|im_end|>\n<|im_start|>user\n<Instruct>: {INSTRUCTION}\n<Query>: {query}\n"
            f"<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
        )
        files = {"images": [Image.open(seen / file)]} if file else {}
        inputs = processor(text=[text], return_tensors="pt", add_special_tokens=False, **files)
        with torch.no_grad():
            logits = model(**inputs).logits[0, -1]
        expected = (logits[60] - logits[61]).sigmoid().item()
        assert scores[place[0]][place[1]] == pytest.approx(expected, abs=1e-5), place


def test_doctor_plans_pairs_with_their_files(done: Any) -> None:
    said = done["doctor"].output
    checks = {check["name"]: check for check in json.loads(said[said.index("{") :])["checks"]}
    assert "the files of" in checks["memory"]["evidence"]
    assert (checks["memory"]["status"], checks["files"]["evidence"]) == ("ok", "16 can be read")


def test_sentence_transformers_gives_the_same(done: Any, seen: Path) -> None:
    from PIL import Image
    from sentence_transformers import CrossEncoder

    theirs = CrossEncoder(str(done["exported"].folder))
    scores = json.loads(done["scored"].folder.with_name("scored.jsonl").read_text().splitlines()[0])["scores"]
    pairs = [("which one is it?", Image.open(seen / "a.png")), ("which one is it?", "neither")]
    for pair, place in zip(pairs, (0, 3), strict=True):
        assert float(theirs.predict([pair])[0]) == pytest.approx(scores[place], abs=1e-4)


def test_a_file_that_cannot_be_used_is_told_before(done: Any, seen: Path, tmp_path: Path) -> None:
    from shardproof.train.reranker.ranker import rank_rows

    shutil.copy(seen / "a.png", tmp_path)
    file = tmp_path / "rows.jsonl"
    rows = [{"query": "x", "positive": "<image>", "positive_images": [[name]]} for name in ("a.png", "none.png")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = done["exported"].folder
    model = AskedRanker(folder, scoring_in(folder), None)
    with pytest.raises(DataError, match=r"rows.jsonl:2: image 1 \(none.png\): there is no such file"):
        list(rank_rows(model, [str(file)], {}, tmp_path / "out.jsonl", 2))
    assert not (tmp_path / "out.jsonl").exists()
    good = read_rows([file], form=Matches(several=True, files=True).form)[0]
    assert model.scores([good])[0].shape == (1,)


@pytest.mark.parametrize("task, model", [("reranker", "decoder"), ("generative_reranker", "asked")])
def test_what_takes_no_files_says_so(models: Any, seen: Path, tmp_path: Path, task: str, model: str) -> None:
    file, place = tmp_path / "rows.jsonl", str(models[model])
    file.write_text(json.dumps(ROWS[0]) + "\n")
    config = SftConfig(
        task=task, model=place, dataset=[str(file)], media_root=str(seen), output_dir=str(tmp_path / "run"), workers=0
    )
    recipe = recipe_of(config)
    with pytest.raises(DataError, match="it has files, but this is a text model"):
        recipe.prepare(config, 1, *recipe.read(config))


def test_a_run_in_which_no_file_reaches_what_is_trained_is_refused(answering: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"query": "x", "positive": "y", "negative": "z"}) + "\n")
    config = SftConfig(
        task="generative_reranker",
        model=str(answering("llava")),
        dataset=[str(file)],
        output_dir=str(tmp_path / "run"),
        freeze=["llm"],
        workers=0,
    )
    recipe = recipe_of(config)
    made = recipe.prepare(config, 1, *recipe.read(config))
    with pytest.raises(ConfigError, match="Nothing would be learned: only aligner, vision is trained"):
        recipe.train(made, Silent())
