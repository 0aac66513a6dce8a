"""Promise: `--launcher ray` gives, on a real local Ray cluster, what the command gives by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardproof.cli.processes.on_ray import launch
from shardproof.errors import ConfigError
from shardproof.train.options.config import SftConfig


@pytest.mark.slow
def test_a_run_on_ray_has_the_losses_of_one_without(tiny: Path, rows: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    fixed = ["--model", str(tiny), "--dataset", str(rows), "--max-steps", "3", "--global-batch-size", "4"]
    losses = []
    for name, more in (("ray", ["--launcher", "ray"]), ("alone", [])):
        command = [sys.executable, "-m", "shardproof", "sft", *fixed, "--stage", "3", "--nproc", "2", *more]
        done = subprocess.run(
            [*command, "--output-dir", name],
            cwd=tmp_path,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert len(losses[0]) == 3
    assert not (tmp_path / "ray.ray").exists()


@pytest.mark.parametrize(
    ("given", "text"),
    [({}, "needs --output-dir"), ({"output_dir": "x", "max_restarts": 1}, "--resume auto instead")],
)
def test_what_does_not_go_with_ray(given, text):
    with pytest.raises(ConfigError, match=text):
        launch(SftConfig(launcher="ray", **given), [])
