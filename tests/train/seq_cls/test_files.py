"""Promise: classifiers and rerankers of models that see and hear have the losses and measures of one process at every
stage, what they say is what their backbone and head say, and their folders are loaded again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.data.forms.labels import Labels
from shardproof.data.rows import Row
from shardproof.doctor.config import PlanConfig
from shardproof.doctor.planning.subject import meta_model
from shardproof.errors import ConfigError, DataError
from shardproof.models.scorers import SCORER, load_scorer
from shardproof.plugins import Plugins
from shardproof.train.adapters.adding import check_named_parts
from shardproof.train.checks.contradictions import check_together
from shardproof.train.model.loading import registered_model
from shardproof.train.options.config import SftConfig
from shardproof.train.seq_cls.classifier import Classifier
from shardproof.train.seq_cls.labelling import labels_in
from train.rlhf.algorithms import prepared_for
from train.seq_cls.conftest import series_of
from train.seq_cls.test_same_losses import LORA, STAGES

pytestmark = pytest.mark.slow

COMMON = "--max-steps 3 --learning-rate 1e-4 --lr-scheduler constant --global-batch-size 4 --workers 0".split()
NUMBERED = Labels.numbered(3)
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
    """Two ranks with micro-batches of 2 rows are to be one process with micro-batches of 4. Returns its run."""
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


@pytest.mark.parametrize("task", ["seq_cls", "reranker"])
def test_rows_that_lose_their_files_are_none_of_their_step(
    pools: Any, tiny_models: Any, rows: Any, tmp_path: Path, task: str
) -> None:
    """Of two rows one, which is all that one of two processes has."""
    kind, lost = {"seq_cls": ("seen", 3), "reranker": ("pairs", 1)}[task]
    lines = rows[kind].read_text().splitlines()
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(rows[kind].with_name(name).read_bytes())
    (tmp_path / "kept.jsonl").write_text(lines[0])
    (tmp_path / "both.jsonl").write_text(f"{lines[0]}\n{lines[lost]}")
    options = ["--task", task, *(NAMES if task == "seq_cls" else []), "--model", str(tiny_models("qwen2_5_vl"))]
    options += "--max-steps 1 --workers 0 --stage 3 --gradient-accumulation-steps 1 --dataset".split()
    prepared = []
    for name, world, micro in (("kept", 1, 1), ("both", 1, 2), ("both", 2, 1)):
        words, more = [*options, str(tmp_path / f"{name}.jsonl")], {"per_device_batch_size": micro}
        prepared.append((world, prepared_for(words, world, [more], tmp_path / f"{name}{world}", SftConfig)))
    (tmp_path / "b.png").unlink()
    found = [pools.run(world, series_of, runs, timeout=300.0)[0][0] for world, runs in prepared]
    for key in ("loss", "grad_norm"):
        kept, one, several = ([record[key] for record in records if key in record] for records in found)
        assert one == pytest.approx(kept, rel=1e-4)
        assert several == pytest.approx(kept, rel=1e-4)


@pytest.mark.parametrize(("task", "kind"), [("seq_cls", "seen"), ("reranker", "pairs"), ("embedding", "pairs")])
def test_where_no_row_is_short_enough_nothing_is_said_of_cuts(
    tiny_models: Any, rows: Any, tmp_path: Path, task: str, kind: str
) -> None:
    options = ["--task", task, *(NAMES if task == "seq_cls" else []), "--model", str(tiny_models("llava"))]
    options += ["--dataset", str(rows[kind]), "--max-length", "4", "--truncation", "right", "--workers", "0"]
    with pytest.raises(DataError, match="or make files smaller") as told:
        prepared_for(options, 1, [{}], tmp_path, SftConfig)
    assert "--truncation" not in str(told.value)


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


@pytest.mark.parametrize("name", ["gemma3", "llava"])  # of which transformers has the processor without torchvision
def test_logits_are_those_of_the_backbone_and_a_head(tiny_models: Any, rows: Any, tmp_path: Path, name: str) -> None:
    from PIL import Image
    from transformers import AutoModel, AutoProcessor

    processor = AutoProcessor.from_pretrained(tiny_models(name))
    model = load_scorer(str(tiny_models(name)), **NUMBERED.config)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    ours, backbone = Classifier(tmp_path, NUMBERED), AutoModel.from_pretrained(tmp_path).eval()
    picture = rows["seen"].with_name("a.png")
    for content, files in (("which?", []), ([{"type": "image", "image": str(picture)}], [Image.open(picture)])):
        turns = [{"role": "user", "content": content}]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        text = processor.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
        )
        inputs = processor(text=text, images=files or None, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            expected = model.score(backbone(**inputs).last_hidden_state[:, -1])
        torch.testing.assert_close(ours.logits([Row(turns, "", 0)]), expected, atol=1e-5, rtol=1e-4)


def test_what_is_frozen_leaves_the_head(tiny_models: Any) -> None:
    from shardproof.train.seq_cls.labelling import load_classifier
    from shardproof.train.seq_cls.recipe import trained as frozen_in

    some = {"task": "seq_cls", "model": "x", "label_names": NAMES[1:]}
    cases: list[tuple[dict[str, Any], set[str]]] = [
        ({"freeze": ["llm", "aligner"]}, {"model.visual", "score"}),
        ({"train_parts": ["vision"]}, {"model.visual", "score"}),
        ({"freeze": ["llm", "vision", "aligner"]}, {"score"}),
        ({}, {"model", "score"}),
    ]
    for more, learnt in cases:
        config = SftConfig(**some, **more)
        check_together(config)
        model, info = load_classifier(str(tiny_models("qwen2_5_vl")), config, NUMBERED)
        found = frozen_in(model, config, info)
        names = [name for name, p in found.named_parameters() if p.requires_grad]
        assert "score.weight" in names
        assert "lm_head.weight" not in names
        assert all(name.startswith(tuple(learnt)) for name in names)


def test_a_pooler_that_the_files_lack_is_learnt_though_the_rest_is_frozen(models: Any) -> None:
    from shardproof.train.seq_cls.labelling import load_classifier
    from shardproof.train.seq_cls.recipe import trained as frozen_in

    config = SftConfig(task="seq_cls", model="x", label_names=NAMES[1:], freeze=["llm"])
    model, info = load_classifier(str(models["encoder"]), config, NUMBERED)
    found = frozen_in(model, config, info)
    assert {name.rpartition(".")[0] for name, p in found.named_parameters() if p.requires_grad} == {
        "bert.pooler.dense",
        "classifier",
    }


def test_a_head_for_words_is_no_module_to_train(tiny_models: Any) -> None:
    config = SftConfig(task="seq_cls", model="x", tuner="lora", modules_to_save=["lm_head"])
    with pytest.raises(ConfigError, match="--modules-to-save lm_head: the model has no module of that name"):
        check_named_parts(str(tiny_models("qwen2_5_vl")), config, SCORER)


@pytest.mark.parametrize("name", ["gemma3", "llava"])  # transformers has a class with a head of the first
def test_what_is_saved_is_taken_as_a_model_and_planned(tiny_models: Any, tmp_path: Path, name: str) -> None:
    load_scorer(str(tiny_models(name)), **NUMBERED.config).save_pretrained(tmp_path)
    assert registered_model(str(tmp_path), Plugins()) is None
    assert labels_in(tmp_path) == NUMBERED
    for folder in (tmp_path, tiny_models(name)):
        planned: Any = meta_model(PlanConfig(model=str(folder), num_labels=3), SCORER)
        assert len(planned.score.weight) == 3
        assert planned.score.weight.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_5_omni"])
def test_what_is_made_gives_labels_and_is_exported(commands: Any, tiny_models: Any, rows: Any, name: str) -> None:
    data, picture = str(rows["seen"]), str(rows["seen"].with_name("a.png"))
    sft = ["sft", "--task", "seq_cls", "--model", str(tiny_models(name)), "--dataset", data, *NAMES, *COMMON]
    sft += ["--val-dataset", data, "--nproc", "2", "--output-dir", "OUT", "--save-steps", "2"]
    asked = ["--dataset", data, "--result-path", "OUT.jsonl"]
    doctor = ["doctor", "--task", "seq_cls", *NAMES, "--model", str(tiny_models(name)), "--dataset", data]
    done = commands(
        [
            ("full", [*sft, "--stage", "3"]),
            ("lora", [*sft, "--tuner", "lora"]),
            ("went on", [*sft, "--tuner", "lora", "--resume", "RUNS/lora/checkpoint-2"]),
            ("of full", ["infer", "RUNS/full", *asked, "--nproc", "2"]),
            ("of lora", ["infer", "RUNS/lora", *asked]),
            ("merged", ["export", "RUNS/lora", "OUT"]),
            ("of merged", ["infer", "RUNS/merged", *asked]),
            ("of exported", [*sft, "--model", "RUNS/merged"]),
            ("of checkpoint", ["export", "RUNS/lora/checkpoint-3", "OUT"]),
            ("one", ["infer", "RUNS/lora", "--prompt", "<image>which is it?", "--image", picture]),
            ("doctor", [*doctor, "--json", "--nproc", "2"]),
        ]
    )
    for run, found in done.items():
        assert found.code == 0, f"{run}:\n{found.output}"
    for key in ("loss", "grad_norm"):
        assert done["went on"].series(key) == done["lora"].series(key)[2:]
    lines = {run: _lines(done[run].folder.with_name(f"{run}.jsonl")) for run in ("of full", "of lora", "of merged")}
    for of_run in lines.values():
        assert [line["labels"] for line in of_run] == [row["label"] for row in ROWS * 3]
        assert of_run[3]["id"] == 7
    for one, other in zip(lines["of lora"], lines["of merged"], strict=True):
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-4)
    assert lines["of lora"][0]["response"] == done["one"].output.strip().splitlines()[-4]
    said = done["doctor"].output
    checks = {check["name"]: check["status"] for check in json.loads(said[said.index("{") :])["checks"]}
    assert {checks[name] for name in ("weights", "files", "memory", "gradients")} == {"ok"}


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
