"""What transformers' Trainer makes of a loss on several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardproof.models.forward import divides_its_loss

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object


class AveragedLoss(Base):
    """The part of a trainer that keeps a mean a mean.

    Trainer believes that a model whose forward takes **kwargs divides its loss by the tokens of all ranks, and
    multiplies it by their number, since gradients will be averaged. Most classifiers, T5 and BERT return the mean of
    their batch: under DDP their losses and gradients grow with the ranks.
    """

    _tr_loss: Any  # Trainer's

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's own, which is told not to multiply what the model has not divided."""
        if not self._is_mean(inputs):
            return super().compute_loss(model, inputs, *args, **kwargs)
        before, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self.args.average_tokens_across_devices = before

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer adds to the mean of the run what this rank lost since the last log; here it is that of all."""
        self._tr_loss = self.accelerator.gather(self._tr_loss).mean()
        return super()._finalize_training(*args, **kwargs)

    def _is_mean(self, inputs: Any) -> bool:
        """Whether Trainer takes the loss of the model's forward, and that is a mean. A trainer of TRL's divides by
        itself what it computes of the logits; so do a loss function that is given, and the label smoother."""
        own = any(kind.__module__.startswith("trl.") and "compute_loss" in vars(kind) for kind in type(self).__mro__)
        given = self.compute_loss_func is not None or self.label_smoother is not None
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        return not own and not given and not divides_its_loss(self.model, labels)
