"""Promise: what `sft --task reranker` makes scores pairs for `infer` as transformers and sentence-transformers do after
`export`, and goes on from its checkpoints; what makes no sense is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.errors import ConfigError
from shardproof.train.options.config import SftConfig
from shardproof.train.run import recipe_of
from train.reranker.checks import goes_on, lines, ranks_as_it_was_evaluated


@pytest.fixture(scope="module")
def done(commands, files, models) -> Any:
    steps = (
        "--max-steps 6 --learning-rate 3e-3 --lr-scheduler constant --global-batch-size 8 --truncation right".split()
    )
    data = ["--dataset", str(files["ranked"]), "--val-dataset", str(files["ranked-held"])]

    def sft(model: str, *more: str) -> list[str]:
        base = ["sft", "--task_type", "reranker", "--model", str(models[model]), *data, *steps]
        return [*base, "--output-dir", "OUT", *more]

    lora = ["--tuner", "lora", "--nproc", "2", "--save-steps", "3", "--loss_type", "listwise_reranker"]
    full = ["--loss_type", "pointwise_reranker", "--nproc", "2", "--stage", "2"]

    def held(*more: str) -> list[str]:
        return ["--dataset", str(files["ranked-held"]), "--result-path", "OUT.jsonl", *more]

    doctor = ["doctor", "--task", "reranker", "--model", str(models["encoder"]), "--truncation", "right", "--json"]
    return commands(
        [
            ("doctor", [*doctor, "--dataset", str(files["ranked"]), "--trial", "no", "--nproc", "2"]),
            ("shown", ["data", "show", "--task", "reranker", "--model", str(models["encoder"]), *data[:2], "-n", "1"]),
            ("lora", sft("decoder", *lora)),
            ("went on", sft("decoder", *lora, "--resume", "RUNS/lora/checkpoint-3")),
            ("full", sft("encoder", *full)),
            ("scored", ["infer", "RUNS/lora", *held("--batch-size", "3")]),
            ("by ranks", ["infer", "RUNS/full", *held("--batch-size", "2", "--nproc", "2")]),
            ("merged", ["export", "RUNS/lora", "OUT"]),
            ("of merged", ["infer", "RUNS/merged", *held()]),
            ("exported", ["export", "RUNS/full", "OUT"]),
            ("asked", ["infer", "RUNS/lora", "--prompt", "cat"]),
        ]
    )


@pytest.mark.slow
def test_all_went_well(done) -> None:
    for name, run in done.items():
        assert run.code == (2 if name == "asked" else 0), f"{name}:\n{run.output}"
    assert "give rows with both in --dataset" in done["asked"].output
    said = done["doctor"].output
    checks = {check["name"]: check["status"] for check in json.loads(said[said.index("{") :])["checks"]}
    assert {checks[name] for name in ("weights", "memory", "lengths", "trained")} == {"ok"}
    assert "tokens, label [1, " in done["shown"].output


@pytest.mark.slow
def test_a_run_goes_on(done) -> None:
    goes_on(done)


@pytest.mark.slow
def test_scores_rank_as_the_evaluation_says(done) -> None:
    ranks_as_it_was_evaluated(done)


@pytest.mark.slow
def test_transformers_and_sentence_transformers_give_the_same(done) -> None:
    """An encoder, whose tokenizer puts marks between two texts."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder: Path = done["exported"].folder
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    for line in lines(done, "by ranks"):
        query = line["messages"][0]["content"]
        found = [turns[0]["content"] for turns in line["positive_messages"] + line["negative_messages"]]
        texts = tokenizer([query] * len(found), found, padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            theirs = model.eval()(**texts).logits[:, 0].sigmoid()
        assert line["scores"] == pytest.approx(theirs.tolist(), abs=1e-4)
        from sentence_transformers import CrossEncoder

        said = CrossEncoder(str(folder), device="cpu").predict([(query, text) for text in found])
        assert line["scores"] == pytest.approx(said.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"packing": True}, "--task reranker and --packing"),
        ({"num_labels": 2}, "--num-labels: a pair gets one score"),
        ({"loss": "infonce"}, "--loss infonce: the loss must be pointwise or listwise"),
        ({"loss_temperature": 0.5}, "--loss-temperature needs --loss listwise"),
        ({"pooling": "mean"}, "add --task embedding"),
        ({"dataset": ["stdlib"]}, "needs rows with a 'positive'"),
        ({"best_metric": "f1", "keep_best": True, "eval_steps": 1, "val_split": 0.1}, "accuracy, mrr, ndcg"),
    ],
)
def test_what_makes_no_sense(options: dict[str, Any], why: str) -> None:
    config = SftConfig(**{"model": "tiny", "dataset": ["x.jsonl"], "task": "reranker", **options})
    with pytest.raises(ConfigError) as error:
        recipe_of(config).check(config, 1)
    assert why in str(error.value)


@pytest.mark.slow
def test_verify_takes_the_run(commands, files, models) -> None:
    rows = ["--task", "reranker", "--dataset", str(files["ranked"]), "--nproc", "2", "--truncation", "right"]
    ways = {"decoder": ["--loss", "listwise", "--tuner", "lora"], "encoder": []}
    done = commands([(name, ["verify", *rows, *more, "--model", str(models[name])]) for name, more in ways.items()])
    for run in done.values():
        assert run.code == 0, run.output
        assert "equal to 0.0001" in run.output


@pytest.mark.parametrize("task, model", [("reranker", "encoder"), ("generative_reranker", "asked")])
def test_rows_of_which_none_has_a_negative_teach_nothing(models, tmp_path: Path, task: str, model: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"query": "cat", "positive": "meows", "negatives": ["barks"]}\n' * 4)
    place = {"dataset": [str(file)], "model": str(models[model]), "output_dir": str(tmp_path / "run")}
    config = SftConfig(task=task, **place)
    recipe = recipe_of(config)
    with pytest.raises(ConfigError, match="no row has a 'negative'"):
        recipe.prepare(config, 1, *recipe.read(config))
    assert not (tmp_path / "run").exists()
