"""Compare the results of a rank with those of one process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from shardproof.casebook.run import Key

FLOOR = 1e-2  # errors are relative to the largest magnitude in a tensor, but at least to this


@dataclass(frozen=True)
class Difference:
    """The largest relative error, and where it is; infinite if a value is missing or has another shape."""

    error: float
    where: str


def compare(found: dict[Key, Any], expected: dict[Key, Any], rank: int | None) -> Difference:
    """The worst difference over all values that belong to `rank` or to every rank."""
    worst = Difference(0.0, "")
    mine = {key for key in expected if key.rank in (None, rank)} if rank is not None else set(expected)
    for key in sorted(mine | found.keys(), key=str):
        if key not in found or key not in mine:
            error = math.inf
        else:
            error = relative_error(found[key], expected[key])
        if not error <= worst.error:  # nan counts as worse
            worst = Difference(math.inf if math.isnan(error) else error, str(key))
    return worst


def relative_error(a: Any, b: Any) -> float:
    """0 for equal values; otherwise the largest difference over the largest magnitude of `b`."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return 0.0 if type(a) is type(b) and a == b else math.inf
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    return float((a - b).abs().max() / b.abs().max().clamp(min=FLOOR))
