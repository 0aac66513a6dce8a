"""Mixed precision: the dtypes of computing, masters and reductions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class MixedPrecision:
    """Compute in one dtype, keep masters in float32.

    Attributes:
        compute: dtype of the gathered parameters, and so of the forward and backward pass.
        reduce: dtype in which gradients are added over ranks.

    Masters, gradients after reduction and optimizer state are float32 and live on the shard. Floating-point inputs of
    the model's forward are cast to `compute`; buffers keep their dtype, and so do inputs without dimensions: such a
    number does not change the dtype of other operands, and bf16 would turn 2362 tokens into 2368.
    """

    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.float32


def cast_floats(values: Any, dtype: torch.dtype) -> Any:
    def to_dtype(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() else x

    return torch.utils._pytree.tree_map(to_dtype, values)
