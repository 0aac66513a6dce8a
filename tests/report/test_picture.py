"""The picture of the loss."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from report.folders import run_folder
from shardproof.report.picture import draw_loss
from shardproof.report.run_folder import POINTS


def test_a_long_run_is_drawn_by_as_many_points_as_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million would take half a minute at the end of a run, and matplotlib says so in a warning."""
    axes = pytest.importorskip("matplotlib.axes").Axes
    drawn: list[tuple[list[float], list[float]]] = []
    plot = axes.plot
    monkeypatch.setattr(axes, "plot", lambda self, *line, **how: drawn.append(line) or plot(self, *line, **how))
    records = [{"step": step, "loss": float(step % 7)} for step in range(1, 3 * POINTS)]
    run = run_folder(tmp_path / "run", [*records, {"step": 9, "eval_loss": 2.0}])
    assert draw_loss(run / "metrics.jsonl", tmp_path / "loss.png", "a run")
    assert (tmp_path / "loss.png").stat().st_size
    loss, evaluation = drawn
    assert len(loss[0]) <= POINTS
    assert {0.0, 6.0} <= {*loss[1]}
    assert evaluation == ([9], [2.0])


def test_a_picture_that_cannot_be_written_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its weights are there by then. A disk that is full leaves no half of one."""
    figures = pytest.importorskip("matplotlib.figure").Figure

    def full(_: object, path: Path, **how: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(figures, "savefig", full)
    run = run_folder(tmp_path / "run", [{"step": 1, "loss": 1.0}])
    assert not draw_loss(run / "metrics.jsonl", tmp_path / "loss.png", "a run")
    assert caplog.messages == [f"{tmp_path / 'loss.png'} cannot be written: No space left on device"]
    assert not (tmp_path / "loss.png").exists()


def test_a_path_with_dollars_is_a_title_as_it_stands(tmp_path: Path) -> None:
    """Between two of them matplotlib would read a formula, and end a run that has its weights."""
    pytest.importorskip("matplotlib")
    run = run_folder(tmp_path / "run", [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}])
    assert draw_loss(run / "metrics.jsonl", tmp_path / "loss.png", "/data/$_$/model, stage 3")
