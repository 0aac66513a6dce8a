"""The output folder of a run."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from shardproof.train.folder import RunFolder


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
