"""Promise: what makes no sense with labels is refused before anything is loaded, with the option and what to do; what
is shown, planned and verified of such a run is that run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardproof.cli import data, sft
from shardproof.cli.main import main
from shardproof.data.encoding.labelled import LabelReport
from shardproof.data.forms.labels import MULTI, REGRESSION, SINGLE, Labels
from shardproof.doctor.checks.data_checks import lengths
from shardproof.errors import ConfigError
from shardproof.models.scorers import load_scorer
from shardproof.train.options.config import SftConfig
from shardproof.train.run import recipe_of
from shardproof.train.seq_cls.labelling import labels_in, labels_of

JUDGED = {"early_stop": 1, "eval_steps": 1, "val_split": 0.1}
NAMES = {"task": "seq_cls", "label_names": ["low", "high", "odd"]}


def check(**options: Any) -> None:
    config = SftConfig(**{"model": "tiny", "dataset": ["x.jsonl"], **NAMES, **options})
    recipe_of(config).check(config, 1)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"packing": True}, "--task seq_cls and --packing: a row is classified by its last token"),
        ({"chunked_loss": True}, "--chunked-loss"),
        ({"loss": "all"}, "--task seq_cls and --loss: what is learned from a row is its label"),
        ({"liger_kernel": True}, "--liger-kernel"),
        ({"train_parts": ["talker"]}, "--train-parts talker: a talker does not produce scores"),
        ({"plain": True, "chat_template": "chatml"}, "--plain leaves the chat template out"),
        ({"dataset": ["stdlib"]}, "needs rows with a 'label'"),
        ({"label_names": []}, "add --num-labels N, or name them"),
        ({"label_names": ["a", "a"]}, "'a' is listed twice"),
        ({"label_names": ["no.txt"]}, "--label-names no.txt cannot be read"),
        ({"num_labels": 2}, "--num-labels 2, and --label-names has 3"),
        ({"label_names": [], "num_labels": 1, "problem_type": SINGLE}, "nothing to classify"),
        ({"best_metric": "f1", **JUDGED}, "--best-metric f1: an evaluation has loss, accuracy, macro_f1"),
        ({"problem_type": REGRESSION, "best_metric": "mae", **JUDGED}, "metrics other than losses are maximised"),
        ({"metrics": ["accuracy"], "val_split": 0.1}, "evaluations already report a metric of that name"),
        (
            {"task": "causal_lm"},
            "--label-names applies to classifiers, and this run learns answers: add --task seq_cls",
        ),
        ({"columns": {"labels": "x"}}, "Did you mean label=x?"),
    ],
)
def test_what_makes_no_sense(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(**options)
    assert why in str(error.value)


def test_a_model_of_text_has_no_audio_output(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"--enable-audio-output: the model .* has no audio output"):
        load_scorer(str(models["decoder"]), enable_audio_output=False, num_labels=3)


def test_labels_come_from_options_a_file_or_the_model(tmp_path: Path) -> None:
    def labels(**options: Any) -> Labels:
        return labels_of(SftConfig(task="seq_cls", **options))

    file = tmp_path / "names.txt"
    file.write_text("ham\n\n spam \n")
    assert labels(label_names=[str(file)]) == Labels(("ham", "spam"), SINGLE)
    assert labels(num_labels=3).problem == SINGLE
    assert labels(num_labels=1).problem == labels(problem_type=REGRESSION).problem == REGRESSION
    assert labels(num_labels=3, problem_type=MULTI).problem == MULTI
    folder = tmp_path / "model"
    folder.mkdir()
    said = {"architectures": ["XForSequenceClassification"], "id2label": {"1": "b", "0": "a"}, "problem_type": MULTI}
    (folder / "config.json").write_text(json.dumps(said))
    assert labels(model=str(folder)) == labels_in(folder) == Labels(("a", "b"), MULTI)
    assert labels(model=str(folder), label_names=["x", "y"]).names == ("x", "y")
    with pytest.raises(ConfigError, match="already has 2 labels"):
        labels(model=str(folder), num_labels=3)
    (folder / "config.json").write_text(json.dumps({"architectures": ["XForSequenceClassification"]}))
    assert labels_in(folder) == Labels.numbered(2)
    for other in ({"architectures": ["XForCausalLM"]}, {**said, "id2label": {"0": "LABEL_0"}, "problem_type": None}):
        (folder / "config.json").write_text(json.dumps(other))
        assert labels_in(folder) is None  # a model that writes, and one that rewards


def test_the_labels_of_the_rows_are_suggested(files) -> None:
    for name, said in (("named", "--label-names high low odd"), ("numbered", "--num-labels 3")):
        with pytest.raises(ConfigError) as error:
            check(dataset=[str(files[name])], label_names=[])
        assert said in str(error.value)


def test_many_labels_are_for_a_file(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"query": "q", "label": f"name{i}"}) + "\n" for i in range(1500)))
    with pytest.raises(ConfigError, match=r"1,500 labels \(name0, .*, \.\.\.\): --label-names FILE.txt") as caught:
        labels_of(SftConfig(task="seq_cls", dataset=[str(rows)], model="tiny"))
    assert len(str(caught.value)) < 500
    many = LabelReport(rows=2, kept=2, labels={f"name{i}": i for i in range(1, 1500)})
    (*_, check) = lengths(many, SftConfig(task="seq_cls"))
    assert check.evidence.startswith("name1 1, name2 2")
    assert len(check.evidence) < 200


def test_a_bad_label_stops_the_run_before_it_begins(files, tmp_path: Path, capsys) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(files["named"].read_text() + json.dumps({"query": "x", "label": "lwo"}) + "\n")
    words = ["sft", "--task", "seq_cls", "--model", "tiny", "--dataset", str(bad)]
    words += ["--output-dir", str(tmp_path / "run")]
    assert main([*words, "--label-names", "low", "high", "odd"]) == 2
    assert (
        f"{bad}:22: field 'label' is 'lwo', but no label has that name; did you mean 'low'?" in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["plain", "fp8"])
def test_options_of_models_of_text_are_refused_where_files_are_taken(option: str) -> None:
    from shardproof.train.seq_cls import recipe as seq_cls

    processor = SimpleNamespace(tokenizer=object(), image_token="<image>")
    with pytest.raises(ConfigError, match=f"--{option}"):
        seq_cls.encode(SftConfig(**NAMES, **{option: True}), [], processor)


def test_rows_are_shown_with_their_labels(files, models, capsys) -> None:
    words = ["--task", "seq_cls", "--dataset", str(files["named"]), "--model", str(models["decoder"])]
    assert data.run(["show", *words, "--label-names", "low", "high", "odd", "-n", "1"]) == 0
    first, *_, last = capsys.readouterr().out.strip().splitlines()
    label = json.loads(files["named"].read_text().splitlines()[0])["label"]
    assert first.endswith(f"tokens, label {label}")
    assert last.startswith("--- all rows: 21 rows")
    assert f"{label} " in last.partition("labels: ")[2]


@pytest.mark.parametrize("model", ["decoder", "encoder"])
def test_a_plan_is_made(models, model: str) -> None:
    from shardproof.doctor.config import PlanConfig
    from shardproof.doctor.planning.plan import loss_of, make_plan

    shape = {"gpus": [2], "stage": "3", "per_device_batch_size": [2], "max_length": [16], "tuner": "lora"}
    config = PlanConfig(model=str(models[model]), task="seq_cls", num_labels=3, gradient_checkpointing=["no"], **shape)
    (found,) = make_plan(config, *loss_of(config)).candidates
    assert found.peak > 0
    with pytest.raises(ConfigError, match="--task seq_cls and --packing"):
        make_plan(config.model_copy(update={"packing": True}), *loss_of(config))


@pytest.mark.slow
def test_verify_takes_the_run(commands, files, models) -> None:
    rows = ["--task", "seq_cls", "--label-names", "low", "high", "odd", "--dataset", str(files["named"])]
    more = ["--nproc", "2", "--tuner", "lora", "--truncation", "right"]
    done = commands([(name, ["verify", *rows, *more, "--model", str(models[name])]) for name in models])
    for run in done.values():
        assert run.code == 0, run.output
        assert "equal to 0.0001" in run.output


def test_names_stand_in_the_options_of_the_run(models, files, tmp_path: Path) -> None:
    from shardproof.train.seq_cls import recipe as seq_cls

    file = tmp_path / "names.txt"
    file.write_text("low\nhigh\nodd\n")
    words = ["--task", "seq_cls", "--label-names", str(file), "--dataset", str(files["named"])]
    config, _ = sft.parse([*words, "--model", str(models["decoder"]), "--output-dir", str(tmp_path / "run")])
    prepared = seq_cls.prepare(config, 1, *seq_cls.read(config))
    assert prepared.config.label_names == ["low", "high", "odd"]
    assert "label_names:\n- low\n" in (tmp_path / "run" / "config.yaml").read_text()
