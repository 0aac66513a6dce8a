"""Promise: examples/plain_loop.py runs where the model is not on the host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).parents[2] / "examples" / "plain_loop.py"


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
@pytest.mark.parametrize("stage", ["0", "3"])
def test_the_plain_loop(stage):
    ran = subprocess.run(
        [sys.executable, FILE, "--stage", stage], capture_output=True, text=True, timeout=600, env=dict(os.environ)
    )
    assert ran.returncode == 0, ran.stderr
    losses = [float(line.split()[3]) for line in ran.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
