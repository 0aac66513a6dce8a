"""The timeline of a step."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardproof
from shardproof.train.watching.timeline import Timeline


def test_one_that_cannot_be_written_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that is full leaves no half of one, which a report would read."""

    def full(path: Path, text: str, **how: Any) -> None:
        path.write_bytes(b"{")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    model = shardproof.shard(nn.Linear(2, 2), stage=0)
    timeline = Timeline(model.__dict__["_shardproof"], torch.optim.SGD(model.parameters()))
    timeline.begin(1)
    timeline.end(tmp_path / "timeline.json")
    assert caplog.messages == [f"{tmp_path / 'timeline.json'} cannot be written: No space left on device"]
    assert not list(tmp_path.iterdir())
