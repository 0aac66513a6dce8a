"""What an engine writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def write_weights(weights: dict[str, Any], file: Path, dtype: torch.dtype) -> None:
    """Write whole weights in `dtype`, on rank 0, and wait for it."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        floats = {n for n, v in weights.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
        torch.save({name: v.to(dtype) if name in floats else v for name, v in weights.items()}, file)
    if dist.is_initialized():
        dist.barrier()
