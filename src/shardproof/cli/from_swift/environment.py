"""The variables in front of a command of ms-swift's, as options of ours."""

from __future__ import annotations

from shardproof.cli.from_swift.models import token_side
from shardproof.cli.from_swift.options import from_environment

_SAME = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_OF_LIBRARIES = ("PYTORCH_", "TORCH_", "NCCL_", "HF_", "WANDB_")
OF_TOKENS = {"IMAGE_MAX_TOKEN_NUM": "max_pixels", "VIDEO_MAX_TOKEN_NUM": "max_frame_pixels"}


def of_environment(environment: dict[str, str], model: str, notes: list[str]) -> dict[str, str]:
    """The options that variables are; those that are read for a command of Swift's alone are taken out."""
    notes += [
        f"{name}={value} means the same here: put it in front"
        for name, value in environment.items()
        if name in _SAME or name.startswith(_OF_LIBRARIES)
    ]
    found = {"fps": fps} if (fps := environment.get("FPS")) else {}
    if side := token_side(model):
        for name, option in OF_TOKENS.items():
            if (tokens := environment.get(name, "")).isdecimal():
                del environment[name]
                found[option] = str(int(tokens) * side**2)
    return found | from_environment(environment)
