"""deepspeed.accelerator: the device of this rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardproof.zero.device import default_device


class _Accelerator:
    """The methods of DeepSpeed's accelerator that scripts use, implemented with torch."""

    def device_name(self, index: int | None = None) -> str:
        kind = default_device().type
        return kind if index is None or kind == "cpu" else f"{kind}:{index}"

    def current_device_name(self) -> str:
        return str(default_device())

    def communication_backend_name(self) -> str:
        return dist.get_default_backend_for_device(default_device())

    def is_available(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(torch, default_device().type), name)


def get_accelerator() -> Any:
    """An object with `device_name`, `current_device`, `synchronize`, `empty_cache` ... for this rank's device."""
    return _Accelerator()
