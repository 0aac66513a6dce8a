"""The picture of the loss."""

from __future__ import annotations

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
