"""The variables in front of a command of ms-swift's, as options of ours."""

from __future__ import annotations

from shardproof.cli.from_swift.options import from_environment

_SAME = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_OF_LIBRARIES = ("PYTORCH_", "TORCH_", "NCCL_", "HF_", "WANDB_")


def of_environment(environment: dict[str, str], notes: list[str]) -> dict[str, str]:
    """The options that variables are."""
    notes += [
        f"{name}={value} means the same here: put it in front"
        for name, value in environment.items()
        if name in _SAME or name.startswith(_OF_LIBRARIES)
    ]
    found = {"fps": fps} if (fps := environment.get("FPS")) else {}
    return found | from_environment(environment)
