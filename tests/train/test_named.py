"""A run that cannot go on for want of a name says by which command it can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardproof.errors import ConfigError
from shardproof.train.checks.named import check_model, check_named
from shardproof.train.options.config import SftConfig
from shardproof.train.options.rlhf_config import RlhfConfig


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("model: /gone/model\n")
    return tmp_path / "run"


@pytest.mark.parametrize(("kind", "command"), [(SftConfig, "sft"), (RlhfConfig, "rlhf")])
def test_a_model_that_was_moved_is_named_anew(run: Path, kind: Any, command: str) -> None:
    named = {"model": "/gone/model", "dataset": ["rows.jsonl"]}
    file, checkpoint = run / "config.yaml", run / "checkpoint-1"
    for resume, folder, more in (
        (str(checkpoint), str(run), ""),
        (str(run), str(run), ""),
        (str(checkpoint), "other", " --output-dir other"),
        ("auto", str(run), f" --output-dir {run}"),
    ):
        with pytest.raises(ConfigError, match="There is no model folder /gone/model") as error:
            check_model(kind(**named, resume=resume, output_dir=folder))
        end = f"name its new folder: shardproof {command} {file} --resume {resume} --model FOLDER{more}"
        assert str(error.value).endswith(end)
    with pytest.raises(ConfigError, match=r"or 'tiny'\.$"):
        check_model(kind(**named))


def test_what_is_not_named_can_be_taken_from_the_run(run: Path) -> None:
    file, checkpoint = run / "config.yaml", run / "checkpoint-1"
    for given in ({"model": "moved"}, {"dataset": ["a.jsonl", "b.jsonl"]}):
        with pytest.raises(ConfigError, match=r"^--(model|dataset) is missing\.\n") as error:
            check_named(SftConfig(**given, resume=str(checkpoint)))
        words = "--model moved" if "model" in given else "--dataset a.jsonl b.jsonl"
        assert str(error.value).endswith(f"is resumed: shardproof sft {file} --resume {checkpoint} {words}")
    with pytest.raises(ConfigError, match=r"text for trying things out\.$"):
        check_named(SftConfig(model="moved"))
