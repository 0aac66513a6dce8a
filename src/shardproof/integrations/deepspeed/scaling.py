"""Loss scaling for fp16: torch's GradScaler, with the scale that DeepSpeed would choose."""

from __future__ import annotations

import logging
from typing import Any

import torch

from shardproof.errors import NonFiniteError
from shardproof.integrations.deepspeed.sections import Fp16

log = logging.getLogger("shardproof")


class LossScale:
    """Scales losses, unscales gradients, and adapts the scale: down after overflows, up after a while without any.

    A scale of 0 in the settings means dynamic; any other is fixed. If scaling is off, every method passes its argument
    on.

    Attributes:
        scale: the current factor for losses.
    """

    def __init__(self, settings: Fp16, device: torch.device) -> None:
        self.settings = settings
        self.on, self.dynamic = settings.enabled, settings.loss_scale == 0
        self.scale = 1.0
        if self.on:
            self.scale = 2.0**settings.initial_scale_power if self.dynamic else settings.loss_scale
        self.patience = settings.hysteresis
        self.steps, self.last_overflow = 0, -1
        self.device = device
        self._begin()

    def _begin(self) -> None:
        self._scaler = torch.amp.GradScaler(self.device.type, init_scale=self.scale, enabled=self.on)
        self._scaler.scale(torch.zeros((), device=self.device))  # a rank may step without a backward pass

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        return self._scaler.scale(loss.float()) if self.on else loss

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale. Every rank must call it."""
        if self.on:
            self._scaler.unscale_(optimizer)

    def update(self, overflow: bool) -> None:
        """A step was taken, or skipped because of an `overflow`.

        Raises:
            NonFiniteError: the gradients overflow at the smallest allowed scale.
        """
        if not self.on:
            return
        if self.dynamic:
            self._move(overflow)
        self._scaler.update(self.scale)

    def _move(self, overflow: bool) -> None:
        if overflow:
            if self.patience > 1:
                self.patience -= 1
            elif self.scale <= self.settings.min_loss_scale:
                raise NonFiniteError(
                    f"The gradients are not finite at the smallest loss scale, {self.scale:g}. Lower the learning "
                    "rate, look for a division by zero in the loss, or train in bf16."
                )
            else:
                self.scale = max(self.scale / 2, self.settings.min_loss_scale)
            self.last_overflow = self.steps
        else:
            quiet = self.steps - self.last_overflow - 1
            grows = quiet > 0 and quiet % self.settings.loss_scale_window == 0
            if grows or self.settings.consecutive_hysteresis:
                self.patience = self.settings.hysteresis
            if grows:
                self.scale *= 2
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("scale", "patience", "steps", "last_overflow")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a dynamic scale, if the current one is dynamic too; the state of another precision is ignored."""
        if self.on and self.dynamic and state["steps"]:
            self.__dict__.update(state)
            self._begin()
