"""The getters and setters of an engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardproof.errors import ConfigError
from shardproof.integrations.deepspeed.config import Batch
from shardproof.integrations.deepspeed.scaling import LossScale
from shardproof.integrations.deepspeed.sections import Settings


class Answers(nn.Module):
    """The getters and setters that DeepSpeed scripts use."""

    settings: Settings
    sizes: Batch
    optimizer: torch.optim.Optimizer | None
    loss_scale_of: LossScale
    world_size: int
    global_rank: int
    _norm: float | None

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients at the last step, before clipping."""
        return self._norm

    def _of_groups(self, key: str) -> list[Any]:
        return [group.get(key) for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def get_lr(self) -> list[float]:
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        return self._of_groups("betas" if self.optimizer and "betas" in self.optimizer.defaults else "momentum")

    def train_batch_size(self) -> int:
        return self.sizes.train

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.sizes.micro

    def gradient_accumulation_steps(self) -> int:
        return self.sizes.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        return self.sizes.train, self.sizes.micro, self.sizes.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches per step."""
        steps, rest = divmod(train_batch_size, self.sizes.micro * self.world_size)
        if rest or not steps:
            raise ConfigError(
                f"train_batch_size {train_batch_size} is not a multiple of micro-batch x ranks "
                f"({self.sizes.micro} x {self.world_size})."
            )
        self.sizes = Batch(train_batch_size, self.sizes.micro, steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the size of micro-batches, but not their number."""
        steps = self.sizes.accumulation
        self.sizes = Batch(micro_batch_size * steps * self.world_size, micro_batch_size, steps)

    def gradient_clipping(self) -> float:
        return self.settings.gradient_clipping

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        return self.settings.zero_optimization.stage

    def zero_optimization_partition_gradients(self) -> bool:
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.zero_optimization_stage() == 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return True  # full weights are always available here

    def fp16_enabled(self) -> bool:
        return self.settings.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self.settings.bf16.enabled

    def loss_scale(self) -> float:
        return self.settings.fp16.loss_scale

    @property
    def cur_scale(self) -> float:
        """The current loss scale."""
        return self.loss_scale_of.scale

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The compute dtype and the dtype of accumulated gradients."""
        return compute_dtype(self.settings) or torch.float32, torch.float32

    def get_data_parallel_rank(self) -> int:
        return self.global_rank


def compute_dtype(settings: Settings) -> torch.dtype | None:
    """The compute dtype, if the configuration sets it."""
    if settings.bf16.enabled:
        return torch.bfloat16
    return torch.float16 if settings.fp16.enabled else None
