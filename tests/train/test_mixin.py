"""The mixin under a trainer that is not ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("trl_script.py")


@pytest.mark.slow
def test_trl_trains_at_stage_3_as_in_one_process(tiny: Path, rows: Path, tmp_path: Path) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    losses = []
    for name, launcher, stage, micro in (("one", [], "0", "4"), ("two", torchrun, "3", "2")):
        folder = tmp_path / name
        done = subprocess.run(
            [sys.executable, *launcher, str(SCRIPT), str(tiny), str(rows), str(folder), stage, micro],
            capture_output=True,
            text=True,
            timeout=300,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        assert (folder / "model.safetensors").is_file()
        losses.append(json.loads((folder / "losses.json").read_text()))
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
