"""What this machine computes with, and the default precision: bfloat16 on an accelerator that has it, else float32."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shardproof.errors import ConfigError

# The devices of accelerators on Linux: NVIDIA's, AMD's, Ascend's, Intel's and others', and those of WSL.
NODES = ("nvidia[0-9]*", "kfd", "davinci[0-9]*", "dri/renderD*", "accel/*", "dxg")
ASKED = "from shardproof.zero.device import has_bf16; print(has_bf16())"


def may_have_accelerator() -> bool:
    """Whether it is worth asking torch, whose import takes seconds."""
    return sys.platform != "linux" or any(any(Path("/dev").glob(node)) for node in NODES)


def accelerators() -> int:
    """How many accelerators are visible to processes on this machine."""
    if not may_have_accelerator():
        return 0
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def check_devices(nproc: int) -> None:
    """Raise ConfigError for more processes than this machine has accelerators, if it has some."""
    if nproc > 1 and 0 < (count := accelerators()) < nproc:
        raise ConfigError(
            f"--nproc {nproc}, but only {count} accelerator(s) are visible, and processes cannot share one.\nUse "
            f"--nproc {count}, several machines (--nnodes), or make more visible (CUDA_VISIBLE_DEVICES)."
        )


def precision_here() -> str:
    """`bf16` or `fp32`. torch is asked in another process, since it keeps the accelerator memory that it takes to
    answer; and only if there is an accelerator, since asking takes seconds."""
    if not may_have_accelerator():
        return "fp32"
    told = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True)
    return "bf16" if told.stdout.strip() == "True" else "fp32"
