"""Promise: what makes no sense with embeddings is refused before anything is loaded, with the option and what to do;
what is shown, planned and verified of such a run is that run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.cli import data
from shardproof.cli.main import main
from shardproof.errors import ConfigError
from shardproof.train.embedding.embedder import Embedder, single
from shardproof.train.embedding.pooling import Embedding, embedding_in, pooling_of
from shardproof.train.options.config import SftConfig
from shardproof.train.run import recipe_of

JUDGED = {"early_stop": 1, "eval_steps": 1, "val_split": 0.1}


def check(**options: Any) -> None:
    config = SftConfig(**{"model": "tiny", "dataset": ["x.jsonl"], "task": "embedding", **options})
    recipe_of(config).check(config, 1)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"packing": True}, "--task embedding and --packing: each text has its own embedding"),
        ({"chunked_loss": True}, "--chunked-loss"),
        ({"num_labels": 2}, "--num-labels: rows have no labels"),
        ({"chat_template": "chatml"}, "--chat-template: texts are embedded as they are"),
        ({"plain": True}, "--plain: texts are embedded as they are"),
        ({"metrics": ["x"], "val_split": 0.1}, "--metrics"),
        ({"dataset": ["stdlib"]}, "needs rows with a 'positive'"),
        ({"loss": "focal"}, "--loss focal: the loss must be one of infonce, cosine_similarity, contrastive"),
        ({"loss": "contrastive", "loss_temperature": 0.1}, "--loss-temperature needs --loss infonce"),
        ({"deterministic": True}, "--deterministic and --loss infonce"),
        ({"min_processes": 1}, "on fewer processes a row has fewer negatives"),
        ({"best_metric": "f1", **JUDGED}, "--best-metric f1: an evaluation has loss, accuracy, mrr"),
        ({"task": "causal_lm", "pooling": "mean"}, "--pooling applies to embeddings: add --task embedding"),
        ({"task": "seq_cls", "num_labels": 2, "pooling": "mean"}, "add --task embedding"),
        ({"columns": {"postive": "x"}}, "Did you mean positive=x?"),
    ],
)
def test_what_makes_no_sense(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(**options)
    assert why in str(error.value)


def test_a_bad_row_stops_the_run_before_it_begins(files, tmp_path: Path, capsys) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(files["matched"].read_text() + json.dumps({"query": "x", "negative": "y"}) + "\n")
    words = ["sft", "--task", "embedding", "--model", "tiny", "--dataset", str(bad)]
    words += ["--output-dir", str(tmp_path / "run")]
    assert main(words) == 2
    assert f"{bad}:22: there is no 'positive', 'positive_messages' or 'response'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_one_row_without_negatives_teaches_nothing(models, tmp_path: Path) -> None:
    from shardproof.train.embedding import recipe as embedding

    file = tmp_path / "rows.jsonl"
    file.write_text('{"query": "cat", "positive": "meows"}\n{"query": "dog", "positive": "barks"}\n')
    place = {"dataset": [str(file)], "model": str(models["encoder"]), "output_dir": str(tmp_path / "run")}
    config = SftConfig(task="embedding", per_device_batch_size=1, **place)
    with pytest.raises(ConfigError, match="there are none: the rows have no negatives"):
        embedding.prepare(config, 1, *embedding.read(config))
    assert not (tmp_path / "run").exists()


def test_pooling_is_that_of_the_model(models, tmp_path: Path) -> None:
    assert pooling_of("tiny") == pooling_of(str(models["decoder"])) == "last"
    assert pooling_of(str(models["encoder"])) == "mean"
    assert embedding_in(models["encoder"]) is None
    Embedding("cls", "Find:").write(tmp_path, 32)
    assert pooling_of(str(tmp_path)) == "cls"
    assert embedding_in(tmp_path) == Embedding("cls", "Find:")
    file = tmp_path / "1_Pooling" / "config.json"
    file.write_text(json.dumps({"embedding_dimension": 32, "pooling_mode": "lasttoken", "include_prompt": True}))
    assert pooling_of(str(tmp_path)) == "last"
    file.write_text(json.dumps({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}))
    with pytest.raises(ConfigError, match="pools with max_tokens"):
        pooling_of(str(tmp_path))


def test_a_model_that_makes_its_vectors_by_more_than_there_is_here_is_refused(tmp_path: Path) -> None:
    Embedding("mean").write(tmp_path, 32)
    file = tmp_path / "modules.json"
    more = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.base.modules.dense.Dense"}
    file.write_text(json.dumps([*json.loads(file.read_text()), more]))
    with pytest.raises(
        ConfigError, match=r"also applies Dense to its vectors .*: add --pooling mean to start without them"
    ):
        pooling_of(str(tmp_path))
    with pytest.raises(ConfigError, match=r"also applies Dense to its vectors .* Such modules are not supported here"):
        embedding_in(tmp_path)


@pytest.mark.parametrize("prompt", ["Instruct: find\nQuery:", "find:\n", None])
def test_a_model_of_theirs_is_asked_as_they_ask_it(models, tmp_path: Path, prompt: str | None) -> None:
    """By its prompt for queries as it stands, and of a text as many tokens as its file says, not its tokenizer."""
    shutil.copytree(models["encoder"], tmp_path / "theirs")
    Embedding("mean", prompt, longest=9).write(tmp_path / "theirs", 32)
    found = embedding_in(tmp_path / "theirs")
    assert found == Embedding("mean", prompt, (), 9)
    model = Embedder(tmp_path / "theirs", found)
    long = " ".join(["shard the step"] * 5)
    got = torch.cat(model.embeddings([single("the shard"), single(long)]))
    before = model.tokenizer((prompt or "") + "the shard", return_tensors="pt")
    with torch.no_grad():
        bare = model.model(**model.tokenizer((prompt or "") + long, max_length=9, truncation=True, return_tensors="pt"))
        known = [model.model(**before).last_hidden_state.mean(1), bare.last_hidden_state.mean(1)]
    torch.testing.assert_close(got, torch.nn.functional.normalize(torch.cat(known), dim=-1))


def test_rows_are_shown(files, models, capsys) -> None:
    words = ["--task", "embedding", "--dataset", str(files["matched"]), "--model", str(models["encoder"]), "-n", "1"]
    assert data.run(["show", *words, "--truncation", "right"]) == 0
    first, query, positive, *_, last = capsys.readouterr().out.strip().splitlines()
    row = json.loads(files["matched"].read_text().splitlines()[0])
    assert first.endswith("tokens, label 1.0")
    assert query == f"[CLS] {row['messages'][0]['content']} [SEP]"
    assert positive.startswith("[CLS] ")
    assert last.startswith("--- all rows: 21 rows of ")


@pytest.mark.parametrize("model", ["decoder", "encoder"])
def test_a_plan_is_made(models, model: str) -> None:
    from shardproof.doctor.config import PlanConfig
    from shardproof.doctor.planning.plan import loss_of, make_plan

    shape = {"gpus": [2], "stage": "3", "per_device_batch_size": [2], "max_length": [16], "tuner": "lora"}
    config = PlanConfig(model=str(models[model]), task="embedding", gradient_checkpointing=["no"], **shape)
    (found,) = make_plan(config, *loss_of(config)).candidates
    assert found.peak > 0
    with pytest.raises(ConfigError, match="--task embedding and --packing"):
        make_plan(config.model_copy(update={"packing": True}), *loss_of(config))


@pytest.mark.slow
def test_verify_takes_the_run(commands, files, models) -> None:
    rows = ["--task", "embedding", "--dataset", str(files["matched"]), "--nproc", "2", "--truncation", "right"]
    ways = {"decoder": ["--tuner", "lora"], "encoder": []}
    done = commands([(name, ["verify", *rows, *more, "--model", str(models[name])]) for name, more in ways.items()])
    for run in done.values():
        assert run.code == 0, run.output
        assert "equal to 0.0001" in run.output
