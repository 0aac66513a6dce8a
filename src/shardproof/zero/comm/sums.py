"""Buffers as what adds them up wants them."""

from __future__ import annotations

import torch


def add_in_order(parts: list[torch.Tensor], out: torch.Tensor) -> None:
    """Add up; `out` may be one of the first two."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)


def as_real(values: torch.Tensor) -> torch.Tensor:
    """1-D values, complex ones as twice as many real ones: NCCL adds no others, and torch's reduce-scatter hands on
    what it is given."""
    return torch.view_as_real(values).view(-1) if values.is_complex() else values
