"""What a run computes in where nothing is said: bfloat16 on an accelerator that has it, else float32."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# What accelerators look like on Linux: NVIDIA's, AMD's, Ascend's, Intel's and others', and those of WSL.
NODES = ("nvidia[0-9]*", "kfd", "davinci[0-9]*", "dri/renderD*", "accel/*", "dxg")
ASKED = "from shardproof.zero.device import has_bf16; print(has_bf16())"


def precision_here() -> str:
    """`bf16` or `fp32`. torch is asked by another process, for what it takes on an accelerator to answer it keeps; and
    not where there is none, as it takes seconds."""
    if sys.platform == "linux" and not any(any(Path("/dev").glob(node)) for node in NODES):
        return "fp32"
    told = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True)
    return "bf16" if told.stdout.strip() == "True" else "fp32"
