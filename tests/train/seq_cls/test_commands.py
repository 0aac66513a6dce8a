"""Promise: what `sft --task seq_cls` makes gives its labels to `infer`, to transformers after `export`, and goes on
from its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

BERT = {"low": "shard", "high": "weight", "odd": "rank"}


@pytest.fixture(scope="module")
def done(commands, files, models) -> Any:
    steps = "--max-steps 6 --learning-rate 1e-2 --lr-scheduler constant --global-batch-size 8".split()
    steps += ["--truncation", "right"]

    def sft(model: str, rows: str, *more: str) -> list[str]:
        data = ["--dataset", str(files[rows]), "--val-dataset", str(files[f"{rows}-held"])]
        return [
            "sft",
            "--task_type",
            "seq_cls",
            "--model",
            str(models[model]),
            *data,
            *steps,
            "--output-dir",
            "OUT",
            *more,
        ]

    names, several = ["--label-names", *BERT], ["--problem_type", "multi_label_classification"]
    lora = [*names, "--tuner", "lora", "--nproc", "2", "--save-steps", "3"]
    full = ["--num_labels", "3", *several, "--nproc", "2", "--stage", "2", "--save-steps", "3"]

    on = ["--resume", "RUNS/lora/checkpoint-3"]

    def held(rows: str) -> list[str]:
        return ["--dataset", str(files[f"{rows}-held"]), "--batch-size", "3", "--result-path", "OUT.jsonl"]

    doctor = ["doctor", "--task", "seq_cls", *names, "more", "--model", str(models["encoder"]), "--truncation", "right"]
    return commands(
        [
            ("doctor", [*doctor, "--dataset", str(files["named"]), "--json", "--trial", "no", "--nproc", "2"]),
            ("lora", sft("encoder", "named", *lora)),
            ("went on", sft("encoder", "named", *lora, *on)),
            ("other head", sft("encoder", "named", *lora, "--label-names", *sorted(BERT), *on)),
            ("full", sft("decoder", "several", *full)),
            ("amount", sft("decoder", "amount", "--problem-type", "regression", "--use_chat_template", "false")),
            ("asked", ["infer", "RUNS/lora", "--prompt", "the shard holds a process"]),
            ("answered", ["infer", "RUNS/lora", *held("named")]),
            ("by ranks", ["infer", "RUNS/full", *held("several"), "--nproc", "2"]),
            ("amounts", ["infer", "RUNS/amount", *held("amount")]),
            ("merged", ["export", "RUNS/lora", "OUT"]),
            ("of merged", ["infer", "RUNS/merged", *held("named")]),
            ("of checkpoint", ["export", "RUNS/lora/checkpoint-6", "OUT"]),
            ("exported", ["export", "RUNS/full", "OUT"]),
            ("again", sft("encoder", "named", "--model", "RUNS/merged", "--learning-rate", "0")),
            ("hot", ["infer", "RUNS/lora", "--prompt", "x", "--temperature", "1"]),
        ]
    )


def lines(done: Any, name: str) -> list[dict[str, Any]]:
    file = done[name].folder.with_name(f"{name}.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_all_went_well(done) -> None:
    for name, run in done.items():
        assert run.code == (2 if name in ("hot", "other head") else 0), f"{name}:\n{run.output}"
    assert "--label-names" in done["other head"].output
    assert "--temperature applies to answers that are written" in done["hot"].output


def test_doctor_looks_at_it(done) -> None:
    said = done["doctor"].output
    checks = {check["name"]: check for check in json.loads(said[said.index("{") :])["checks"]}
    assert checks["weights"]["status"] == checks["memory"]["status"] == "ok"
    assert (checks["labels"]["status"], checks["labels"]["cause"]) == ("warn", "No row teaches more.")


def test_a_run_goes_on(done) -> None:
    for key in ("loss", "grad_norm"):
        assert done["went on"].series(key) == done["lora"].series(key)[3:]


def test_a_prompt_gets_its_label(done) -> None:
    label, *shares = done["asked"].output.splitlines()
    assert label in BERT
    told = dict(line.split() for line in shares)
    assert set(told) == set(BERT)
    assert max(told, key=lambda name: float(told[name])) == label


def test_rows_get_theirs_and_are_measured(done, files) -> None:
    rows = [json.loads(line) for line in files["named-held"].read_text().splitlines()]
    found = lines(done, "answered")
    for row, line in zip(rows, found, strict=True):
        assert {key: line[key] for key in row} == row
        assert line["labels"] == row["label"]
        assert line["response"] == max(line["probabilities"], key=line["probabilities"].get)
    right = sum(line["response"] == line["labels"] for line in found) / len(found)
    assert f"accuracy {right:.4f}" in done["answered"].output
    assert done["lora"].records[-1]["eval_accuracy"] == pytest.approx(right)
    share = done["full"].records[-1]["eval_macro_f1"]
    assert f"macro_f1 {share:.4f} (13 rows with a label)" in done["by ranks"].output
    assert "stay gathered" not in done["by ranks"].output  # what the engine has to say is no part of an answer
    assert [line["labels"] for line in lines(done, "by ranks")][:1] != [None]
    assert done["amount"].records[-1]["eval_mae"] == pytest.approx(
        sum(abs(line["response"] - line["labels"]) for line in lines(done, "amounts")) / 13, abs=1e-5
    )


def test_what_is_exported_is_what_was_trained(done, models) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    def load(folder: Path, **more: Any) -> Any:
        return AutoModelForSequenceClassification.from_pretrained(folder, **more).eval()

    merged = load(done["merged"].folder)
    assert merged.config.id2label == dict(enumerate(BERT))
    assert merged.config.problem_type == "single_label_classification"
    tokenizer = AutoTokenizer.from_pretrained(done["merged"].folder)
    texts = tokenizer(["the shard holds a process", "weight"], padding=True, return_tensors="pt")
    adapters = PeftModel.from_pretrained(load(models["encoder"], num_labels=3), done["lora"].folder / "model").eval()
    with torch.no_grad():
        expected = merged(**texts).logits
        for model in (adapters, load(done["of checkpoint"].folder)):
            torch.testing.assert_close(model(**texts).logits, expected, atol=1e-5, rtol=1e-4)
    for line, other in zip(lines(done, "answered"), lines(done, "of merged"), strict=True):
        assert other["probabilities"] == pytest.approx(line["probabilities"], abs=1e-5)
    full = load(done["exported"].folder)
    assert full.config.problem_type == "multi_label_classification"
    assert full.config.pad_token_id == AutoTokenizer.from_pretrained(done["exported"].folder).pad_token_id


def test_a_classifier_is_trained_on(done) -> None:
    last = done["lora"].records[-1]
    assert done["again"].records[-1]["eval_loss"] == pytest.approx(last["eval_loss"], abs=1e-5)


def test_no_template_stays_no_template(done) -> None:
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(done["amount"].folder / "model").chat_template is None
    assert AutoTokenizer.from_pretrained(done["full"].folder / "model").chat_template
