"""The output folder of a run."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from shardproof.train.folder import RunFolder


def test_a_log_that_has_no_room_waits_for_it_and_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a checkpoint for which there is none, training goes on. No half of a line is left."""
    folder = RunFolder(tmp_path)
    folder.append({"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (folder.metrics.stat().st_size + 5, before[1]))
    try:
        folder.append({"step": 2})
        folder.append({"step": 3})
        assert folder.metrics.read_text() == '{"step": 1}\n'
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    folder.append({"step": 4})
    assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == [1, 2, 3, 4]
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"{folder.metrics} cannot be written")
