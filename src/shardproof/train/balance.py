"""The term that balances the experts of a mixture, added to the loss with one weight whatever a step is made of."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from shardproof.errors import ConfigError
from shardproof.models.family import without_adapters

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

ASKS = "output_router_logits"  # transformers' switch for the term


class BalanceMixin(Base):
    """For our trainer of models that write: `balance` times the mean of the micro-batches' terms is part of the loss.

    transformers adds a model's own weight times the term to the loss of each micro-batch, by which it weighs more the
    more micro-batches a step has. Here the model only computes it: labels are kept from its forward, and its own weight
    with them.
    """

    balance: float = 0.0
    deterministic: bool

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if not self.balance:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = super().compute_loss(model, {**inputs, ASKS: True}, True, num_items_in_batch)
        shared = self.args.gradient_accumulation_steps
        if self.deterministic:  # gradients of ranks are added up, and else averaged
            shared *= self.accelerator.num_processes
        loss = loss + self.balance / shared * outputs.aux_loss.to(loss.device)
        return (loss, outputs) if return_outputs else loss


def check_balance(model: Any) -> None:
    """Raise ConfigError for a model in which transformers has no term that balances experts."""
    inner = without_adapters(model)
    # Of an omni model a module is trained that has a forward of its own.
    forwards = (inspect.signature(type(module).forward).parameters for module in inner.modules())
    if not any(ASKS in taken and "labels" in taken for taken in forwards):
        raise ConfigError(
            f"--router-aux-loss-coef: transformers has no loss that balances experts in {type(inner).__name__}."
            " Leave it out."
        )
