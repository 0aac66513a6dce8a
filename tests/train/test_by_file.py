"""An evaluation of several files tells the loss of each, on any number of processes, as if it were evaluated alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.data.rows import read_rows
from shardproof.errors import ConfigError
from shardproof.train.losses.by_file import best_of, by_file, check_best, names_of, of_each
from shardproof.train.options.config import SftConfig

pytestmark = pytest.mark.slow


def test_names_are_short_and_no_two_are_alike():
    assert names_of(["data/sums.jsonl", "org/math:easy@test", "MS::org/chat", "stdlib"]) == [
        *("sums", "math_easy_test", "chat", "stdlib")
    ]
    assert names_of(["a/x.jsonl", "b/x.jsonl", "c/x.csv"]) == ["x", "x.2", "x.3"]
    assert names_of(["a/x.jsonl", "b/x.jsonl", "x.2.jsonl"]) == ["x", "x.2", "x.2.2"]
    assert names_of(["x.2.jsonl", "a/x.jsonl", "b/x.jsonl"]) == ["x.2", "x", "x.3"]


def test_the_best_metric_may_be_of_one_file():
    def best(name: str, *files: str, **more: Any) -> str:
        return best_of(SftConfig(val_dataset=files, best_metric=name, **more))

    assert best("eval_b_loss", "a.jsonl#5", "b.jsonl") == best("eval_loss", "a.jsonl", "b.jsonl") == "loss"
    assert best("a_macro_f1", "a.jsonl", "b.jsonl") == "macro_f1"
    assert best("c_loss", "a.jsonl", "b.jsonl") == "c_loss"
    assert best("a_loss", "a.jsonl#5", "a.jsonl#7") == best("a_loss", "a.jsonl") == "a_loss"
    assert best("a_loss", "a.jsonl", "b.jsonl", packing=True) == "a_loss"
    assert best_of(SftConfig(dataset=["a.jsonl", "b.jsonl"], val_split=0.1, best_metric="b_loss")) == "loss"


@pytest.mark.parametrize(
    ("name", "files", "said"),
    [
        (
            "secnd_loss",
            ["first.jsonl", "second.jsonl"],
            "first_loss, first_acc, second_loss, .* Did you mean second_loss",
        ),
        ("c_loss", ["a.jsonl", "b.jsonl"], "for each file a_loss, a_acc, b_loss, b_acc"),
        (
            "eval_acuracy",
            ["a.jsonl"],
            "--best-metric eval_acuracy: an evaluation has the loss, and what --metrics names",
        ),
    ],
)
def test_a_metric_that_no_evaluation_has_is_told_with_those_of_each_file(name: str, files: list[str], said: str):
    config = SftConfig(val_dataset=files, best_metric=name, metrics=["acc"])
    with pytest.raises(ConfigError, match=said):
        check_best(config, ("loss", *config.metrics), "the loss, and what --metrics names")


def test_the_whole_is_that_of_all_rows():
    means = lambda sums: {"loss": sums[0] / sums[1]}  # noqa: E731
    files = {"a": range(2), "b": range(2, 3)}
    sums = torch.tensor([[6.0, 2.0], [2.0, 2.0]])
    assert of_each(files, sums, means) == {"loss": 2.0, "a_loss": 3.0, "b_loss": 1.0}
    assert of_each({"": range(3)}, sums[:1], means) == {"loss": 3.0}
    assert by_file([1, 2]) == {"": range(2)}


@pytest.fixture(scope="module")
def runs(commands, sft, rows: Path, tmp_path_factory: pytest.TempPathFactory):
    """23 rows to train on, and of them 7 and 12 to evaluate on, in two files."""
    folder, lines = tmp_path_factory.mktemp("files"), rows.read_text().splitlines(keepends=True)
    first, second = str(folder / "first.jsonl"), str(folder / "second.jsonl")
    Path(first).write_text("".join(lines[:7]))
    Path(second).write_text("".join(lines[7:19]))
    assert len(read_rows([first, second])) == 19
    both, every = ["--val-dataset", first, second], ["--eval-steps", "2"]
    two = ["--nproc", "2", "--stage", "3"]
    return commands(
        [
            ("one", sft(*both, *every)),
            ("two", sft(*both, *every, *two, "--keep-best", "--best-metric", "second_loss", "--save-steps", "2")),
            ("first", sft("--val-dataset", first, *every)),
            ("second", sft("--val-dataset", second, *every)),
            ("odd", sft(*both, *every, "--keep-best", "--best-metric", "third_loss", "--save-steps", "2")),
        ]
    )


def test_each_file_has_the_loss_that_it_has_alone(runs):
    for name in ("one", "two", "first", "second"):
        assert runs[name].code == 0, runs[name].output
    for name in ("one", "two"):
        for file in ("first", "second"):
            assert runs[name].series(f"eval_{file}_loss") == pytest.approx(runs[file].series("eval_loss"), abs=1e-5)
    assert runs["two"].series("eval_loss") == pytest.approx(runs["one"].series("eval_loss"), abs=1e-5)
    assert len(runs["one"].series("eval_loss")) >= 2
    assert not runs["first"].series("eval_first_loss")
    both = zip(*(runs["one"].series(f"eval_{name}loss") for name in ("first_", "", "second_")), strict=True)
    assert all(min(a, b) < whole < max(a, b) for a, whole, b in both)


def test_the_best_is_told_by_the_loss_of_one_file(runs):
    assert "second " in runs["two"].output
    assert runs["odd"].code == 2
    told = "an evaluation has the loss, and what --metrics names, and for each file first_loss, second_loss."
    assert told in runs["odd"].output
