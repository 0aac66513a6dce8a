"""Promise: what --report-to names has all of a run when its processes have ended, where its package is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# What keeps a run on this machine, and which files then hold its records, of at least so many bytes.
LOCAL = {
    "wandb": ({"WANDB_MODE": "offline"}, "wandb/offline-run-*/*.wandb", 2000),
    "swanlab": ({"SWANLAB_MODE": "offline"}, "swanlog/run-*/*.swanlab", 2000),
    "trackio": ({"TRACKIO_DIR": "trackio"}, "trackio/*.db", 2000),
    "mlflow": ({"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_TRACKING_URI": "mlruns"}, "mlruns/*/*/metrics/loss", 20),
}


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("name", LOCAL)
def test_a_report_is_whole_when_its_run_has_ended(sft, tmp_path: Path, name: str, nproc: int) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    variables, pattern, least = LOCAL[name]
    argv = [arg.replace("OUT", "run") for arg in sft("--nproc", str(nproc), "--stage", "3", "--report-to", name)]
    command = [sys.executable, "-m", "shardproof", *argv]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sum(file.stat().st_size for file in tmp_path.glob(pattern)) >= least
