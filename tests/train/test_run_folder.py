"""The output folder of a run."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from shardproof.train import run
from shardproof.train.folder import RunFolder
from shardproof.train.options.config import Batch, SftConfig
from shardproof.train.options.places import with_real_places
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.run import Prepared


@pytest.mark.parametrize("name", ["records", "answers"])
def test_a_log_that_has_no_room_waits_for_it_and_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """As with a checkpoint for which there is none, training goes on. No half of a line is left."""
    file = getattr(RunFolder(tmp_path), name)
    file.add({"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.path.stat().st_size + 5, before[1]))
    try:
        file.add({"step": 2}, {"step": 2})
        file.add({"step": 3})
        assert file.path.read_text() == '{"step": 1}\n'
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    file.add({"step": 4})
    assert [json.loads(line)["step"] for line in file.path.read_text().splitlines()] == [1, 2, 2, 3, 4]
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"{file.path} cannot be written")


def test_texts_are_written_as_they_are(tmp_path: Path) -> None:
    answers = RunFolder(tmp_path).answers
    texts = ["早上好", "cut \ud83d", "two\nlines"]
    answers.add(*({"completion": text} for text in texts))
    lines = answers.path.read_text(encoding="utf-8").splitlines()
    assert "早上好" in lines[0]
    assert [json.loads(line)["completion"] for line in lines] == texts


def test_a_log_that_was_cut_off_tells_of_the_last_whole_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert folder.last_step() == 2
    folder.metrics.write_text('{"ste')
    assert folder.last_step() == 0


def test_words_stay_words_whatever_lies_here_under_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder `tiny` took the place of the model that a run was of, in its config.yaml."""
    for name in ("tiny", "stdlib", "length", "same", "brevity"):
        (tmp_path / name).mkdir()
    for name in ("my.py", "rows.jsonl"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    words: dict[str, Any] = {"model": "tiny", "ref_adapters": "same", "tools": ["my.py:g"], "environments": ["my.py:H"]}
    words["reward_funcs"] = ["length", "brevity", "my.py:f"]
    config = RlhfConfig(**words, dataset=["stdlib#9", "rows.jsonl#9"])
    folder = RunFolder(tmp_path)
    folder.write_config(config)
    written = yaml.safe_load(folder.config.read_text())
    whole = {"tools": [f"{tmp_path}/my.py:g"], "environments": [f"{tmp_path}/my.py:H"]}
    whole["reward_funcs"] = ["length", "brevity", f"{tmp_path}/my.py:f"]
    assert {name: written[name] for name in words} == words | whole
    assert with_real_places(words) == words | whole, "what a run that goes on with this file compares"
    assert written["dataset"] == ["stdlib#9", f"{tmp_path}/rows.jsonl#9"]


def test_answers_that_a_checkpoint_has_are_not_in_the_log_as_well(tmp_path: Path) -> None:
    """They are written down with the next record: behind a checkpoint in mid-log they stood there twice."""
    folder = RunFolder(tmp_path)
    folder.records.add(*({"step": step} for step in (2, 4)))
    folder.answers.add(*({"step": step} for step in (1, 2, 3, 4)))
    folder.forget_after(3)
    logged = [[json.loads(line)["step"] for line in log.open()] for log in (folder.metrics, folder.completions)]
    assert logged == [[2], [1, 2]]


def test_a_run_that_begins_again_from_another_run_has_each_step_once_in_its_log(tmp_path: Path) -> None:
    """Ranks that died before there was a checkpoint have left what they logged."""
    start = tmp_path / "first" / "checkpoint-2"
    start.mkdir(parents=True)
    (start / "trainer_state.json").write_text('{"global_step": 2}')
    folder = RunFolder(tmp_path / "second")
    folder.path.mkdir()
    folder.records.add({"step": 3, "loss": 1.0}, {"step": 4, "loss": 0.9})
    prepared = Prepared(SftConfig(max_steps=5), Batch(micro=1, accumulation=1, world_size=1), folder.path, *[None] * 5)
    prepared.starts = [start]
    begun = SimpleNamespace(train=lambda **how: folder.records.add({"step": 3, "loss": 1.0}))
    run._train_from_the_best(begun, prepared, folder, True)
    assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == [3]
