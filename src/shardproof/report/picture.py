"""The plot of the loss, from metrics.jsonl alone."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

from shardproof.report.run_folder import thin

log = logging.getLogger("shardproof")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def draw_loss(metrics: Path, picture: Path, title: str) -> bool:
    """Draw training and evaluation loss over the steps. Returns False if matplotlib is not installed, or if the file
    cannot be written, which is logged: a run with saved weights must not fail because of it."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read_metrics(metrics)
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for key, style in (("loss", {"linewidth": 1.3}), ("eval_loss", {"marker": "o", "linestyle": "--"})):
        points = [(r["step"], r[key]) for r in records if key in r]
        if points:
            line = thin(([step for step, _ in points], [value for _, value in points]))
            axes.plot(*line, label=key.replace("_", " "), **style)  # type: ignore[arg-type]
    axes.set(xlabel="step", ylabel="loss")
    axes.set_title(title, parse_math=False)  # a path may contain dollars
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    try:
        figure.savefig(picture, dpi=110)
    except OSError as error:
        with contextlib.suppress(OSError):
            picture.unlink()
        log.warning("%s cannot be written: %s", picture, error.strerror or error)
        return False
    return True
