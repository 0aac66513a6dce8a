"""How transformers' Trainer scales a loss on several ranks."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardproof.models.forward import divides_its_loss

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

# A `compute_loss` that mentions one of these may already account for the number of ranks.
_OF_RANKS = {"num_processes", "world_size", "get_world_size", "average_tokens_across_devices"}


class AveragedLoss(Base):
    """The part of a trainer that keeps a mean a mean.

    Trainer assumes that a model whose forward takes **kwargs divides its loss by the tokens of all ranks, and
    multiplies it by the number of ranks, since gradients will be averaged. Most classifiers, T5 and BERT return the
    mean of their batch: under DDP their losses and gradients grow with the number of ranks. A trainer that divides by
    `num_items_in_batch` in its own `compute_loss` (TRL's GKD, GOLD) leaves out that factor: under DDP they shrink.
    """

    _tr_loss: Any  # Trainer's

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Like the trainer's own, but a loss that the model did not divide is not multiplied."""
        if not self._is_mean(inputs):
            return super().compute_loss(model, inputs, *args, **kwargs)
        before, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self.args.average_tokens_across_devices = before

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """The tokens of all ranks, or their mean over ranks if the trainer only divides its loss by them."""
        found = super()._get_num_items_in_batch(*args, **kwargs)
        kind: Any = type(self)
        mean = found is not None and self.args.average_tokens_across_devices and _divides_itself(kind)
        return found / self.accelerator.num_processes if mean else found

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer adds this rank's loss since the last log to the mean of the run; here it is the mean over all
        ranks."""
        self._tr_loss = self.accelerator.gather(self._tr_loss).mean()
        return super()._finalize_training(*args, **kwargs)

    def _is_mean(self, inputs: Any) -> bool:
        """Whether Trainer uses the loss of the model's forward, and that is a mean. TRL's trainers divide the losses
        that they compute from logits themselves; so do a given loss function and the label smoother."""
        own = any(kind.__module__.startswith("trl.") and "compute_loss" in vars(kind) for kind in type(self).__mro__)
        given = self.compute_loss_func is not None or self.label_smoother is not None
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        return not own and not given and not divides_its_loss(self.model, labels)


@functools.cache
def _divides_itself(trainer: type[Any]) -> bool:
    """Whether a trainer's own `compute_loss`, not transformers', divides its loss by `num_items_in_batch`, and does not
    multiply it by the number of ranks. One that calls the next class for the loss is skipped."""
    for kind in trainer.__mro__:
        method = vars(kind).get("compute_loss")
        if method is None or kind is AveragedLoss:
            continue
        code = getattr(inspect.unwrap(method), "__code__", None)
        if code is None or kind.__module__ == "transformers.trainer":
            return False
        names = {step.argval for step in dis.get_instructions(code) if step.opname.startswith("LOAD")}
        if names & _OF_RANKS:
            return False
        if "compute_loss" not in names:
            return "num_items_in_batch" in names
    return False
