"""deepspeed.ops.adam: optimizers that scripts import, implemented as torch's AdamW with DeepSpeed's defaults."""

from __future__ import annotations

from typing import Any

import torch

from shardproof.integrations.deepspeed.optimizers import make
from shardproof.integrations.deepspeed.sections import Named


def FusedAdam(model_params: Any, **settings: Any) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay (`adam_w_mode=True`) of 0 by default."""
    return make(Named(type="Adam", params=settings), model_params)


def DeepSpeedCPUAdam(model_params: Any, adamw_mode: bool = True, **settings: Any) -> torch.optim.Optimizer:
    """The same: with offload it steps on the CPU, where the state is."""
    return make(Named(type="Adam", params={"adam_w_mode": adamw_mode, **settings}), model_params)
