"""Ranks communicate only once for a logged step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from shardproof.train.trainer import CommandMixin as Base
else:
    Base = object


class LogsOnce(Base):
    """The part of a trainer that sends the loss, the number of operations and the recorded figures in one exchange."""

    current_flos: float  # an attribute of Trainer, which does not declare it

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        """Trainer's, except for logging."""
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._log_step(tr_loss, grad_norm, kwargs.get("learning_rate"))
        if self.control.should_evaluate or self.control.should_save:
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _log_step(self, tr_loss: torch.Tensor, grad_norm: Any, learning_rate: float | None) -> None:
        everyone = self._of_all_ranks([tr_loss.item(), float(self.current_flos), *self._taken()])
        losses, operations, *_ = zip(*everyone, strict=True)
        loss = torch.tensor(losses, dtype=tr_loss.dtype).mean().item()
        tr_loss.zero_()
        self._total_loss_scalar += loss
        self.state.total_flos += sum(operations)
        self.current_flos = 0
        logs = {"loss": loss / (self.state.global_step - self._globalstep_last_logged)}
        if grad_norm is not None:
            logs["grad_norm"] = float(grad_norm)
        logs["learning_rate"] = self._get_learning_rate() if learning_rate is None else learning_rate
        self._globalstep_last_logged = self.state.global_step
        self._add_recorded(logs, [row[2:] for row in everyone])
        self.log(logs)
