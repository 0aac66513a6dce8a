"""Promise: what `sft --task embedding` makes finds more than before, embeds rows for `infer`, is the same model for
transformers and sentence-transformers after `export`, and goes on from its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

SYSTEM = "under near"


@pytest.fixture(scope="module")
def done(commands, files, models) -> Any:
    steps = "--max-steps 6 --learning-rate 1e-2 --lr-scheduler constant --per-device-batch-size 4".split()

    def sft(model: str, rows: str, *more: str) -> list[str]:
        data = ["--dataset", str(files[rows]), "--val-dataset", str(files[f"{rows}-held"])]
        base = ["sft", "--task_type", "embedding", "--model", str(models[model]), *data, *steps]
        return [*base, "--truncation", "right", "--output-dir", "OUT", *more]

    lora = ["--tuner", "lora", "--nproc", "2", "--save-steps", "3", "--loss_type", "infonce"]
    full = ["--pooling", "mean", "--system", SYSTEM, "--nproc", "2", "--stage", "2", "--save-steps", "3"]
    found = ["--learning-rate", "3e-3", "--max-steps", "100", "--eval-steps", "20", "--per-device-batch-size", "16"]
    found += ["--keep-best", "--best-metric", "mrr", "--save-steps", "20"]

    still = ["--learning-rate", "0", "--system", SYSTEM, "--gradient-accumulation-steps", "2"]

    def held(*more: str) -> list[str]:
        return ["--dataset", str(files["matched-held"]), "--result-path", "OUT.jsonl", *more]

    doctor = ["doctor", "--task", "embedding", "--model", str(models["encoder"]), "--truncation", "right", "--json"]
    return commands(
        [
            ("doctor", [*doctor, "--dataset", str(files["matched"]), "--trial", "no", "--nproc", "2"]),
            ("lora", sft("decoder", "matched", *lora)),
            ("went on", sft("decoder", "matched", *lora, "--resume", "RUNS/lora/checkpoint-3")),
            ("full", sft("encoder", "matched", *full)),
            ("found", sft("decoder", "many", *found)),
            ("asked", ["infer", "RUNS/lora", "--prompt", "cat dog"]),
            ("embedded", ["infer", "RUNS/lora", *held("--batch-size", "3")]),
            ("by ranks", ["infer", "RUNS/full", *held("--batch-size", "2", "--nproc", "2")]),
            ("merged", ["export", "RUNS/lora", "OUT"]),
            ("of merged", ["infer", "RUNS/merged", *held()]),
            ("of checkpoint", ["export", "RUNS/lora/checkpoint-6", "OUT"]),
            ("exported", ["export", "RUNS/full", "OUT"]),
            ("again", sft("encoder", "matched", "--model", "RUNS/exported", *still)),
            ("hot", ["infer", "RUNS/lora", "--prompt", "x", "--temperature", "1"]),
        ]
    )


def lines(done: Any, name: str) -> list[dict[str, Any]]:
    file = done[name].folder.with_name(f"{name}.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_all_went_well(done) -> None:
    for name, run in done.items():
        assert run.code == (2 if name == "hot" else 0), f"{name}:\n{run.output}"
    assert "--temperature applies to answers that are written" in done["hot"].output


def test_doctor_looks_at_it(done) -> None:
    said = done["doctor"].output
    checks = {check["name"]: check["status"] for check in json.loads(said[said.index("{") :])["checks"]}
    assert {checks[name] for name in ("weights", "memory", "lengths", "trained")} == {"ok"}


def test_training_finds_more(done) -> None:
    """On held-out rows, of which each has one positive among 16 texts."""
    accuracy, mrr = done["found"].series("eval_accuracy"), done["found"].series("eval_mrr")
    assert max(mrr) > 0.6
    assert max(mrr) > mrr[0] + 0.15
    assert max(accuracy) >= 0.4
    last = done["found"].records[-1]
    assert last["eval_mean_pos"] > last["eval_mean_neg"] + 0.3


def test_a_run_goes_on(done) -> None:
    for key in ("loss", "grad_norm"):
        assert done["went on"].series(key) == done["lora"].series(key)[3:]


def test_rows_get_embeddings_and_similarities(done, files) -> None:
    rows = [json.loads(line) for line in files["matched-held"].read_text().splitlines()]
    for name in ("embedded", "by ranks"):
        for row, line in zip(rows, lines(done, name), strict=True):
            assert {key: line[key] for key in row} == row
            assert torch.tensor(line["embedding"]).norm() == pytest.approx(1, abs=1e-4)
            assert len(line["similarities"]) == 1 + len(row.get("negative_messages", []))
    for name, run in (("embedded", "lora"), ("by ranks", "full")):
        positive = [line["similarities"][0] for line in lines(done, name)]
        assert sum(positive) / 13 == pytest.approx(done[run].records[-1]["eval_mean_pos"], abs=1e-5)
    assert len(json.loads(done["asked"].output)) == 32


def test_what_is_exported_is_what_was_trained(done) -> None:
    for line, other in zip(lines(done, "embedded"), lines(done, "of merged"), strict=True):
        assert other["embedding"] == pytest.approx(line["embedding"], abs=1e-4)
    assert (done["of checkpoint"].folder / "modules.json").is_file()
    last = done["full"].records[-1]
    assert done["again"].records[-1]["eval_loss"] == pytest.approx(last["eval_loss"], abs=1e-5)
    assert "pooling: mean" in (done["again"].folder / "config.yaml").read_text()


def by_transformers(folder: Path, texts: list[str], pooling: str) -> torch.Tensor:
    """As the pages of such models say."""
    from transformers import AutoModel, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(folder).eval()(**tokens).last_hidden_state
    mask = tokens["attention_mask"]
    rows = [
        vectors[held.bool()][-1] if pooling == "last" else vectors[held.bool()].mean(0)
        for vectors, held in zip(hidden, mask, strict=True)
    ]
    return torch.nn.functional.normalize(torch.stack(rows), dim=-1)


def test_transformers_and_sentence_transformers_give_the_same(done) -> None:
    for run, export, pooling in (("embedded", "merged", "last"), ("by ranks", "exported", "mean")):
        prompt = "" if pooling == "last" else f"{SYSTEM}\n"
        ours = torch.tensor([line["embedding"] for line in lines(done, run)])
        texts = [line["messages"][0]["content"] for line in lines(done, run)]
        folder = done[export].folder
        theirs = by_transformers(folder, [prompt + text for text in texts], pooling)
        torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)
        from sentence_transformers import SentenceTransformer

        found = SentenceTransformer(str(folder), device="cpu").encode_query(texts, convert_to_tensor=True)
        torch.testing.assert_close(found, ours, atol=1e-4, rtol=0)
