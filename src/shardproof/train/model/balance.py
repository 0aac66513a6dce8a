"""The load-balancing term for mixtures of experts, added to the loss with the same weight however a step is split."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

from shardproof.errors import ConfigError
from shardproof.models.forward import without_adapters

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

ASKS = "output_router_logits"  # transformers' switch for the term
COMPUTES = "load_balancing_loss_func"  # computes it; has this name in the module of every model that has the term


class BalanceMixin(Base):
    """For our trainer of generative models: `balance` times the mean of the micro-batches' terms is part of the loss.

    transformers adds the model's own weight times the term to the loss of each micro-batch, so that the term weighs
    more the more micro-batches a step has. Here the model only computes the term: its forward gets no labels, and so
    does not apply its own weight.
    """

    balance: float = 0.0
    deterministic: bool

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if not self.balance:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = super().compute_loss(model, {**inputs, ASKS: True}, True, num_items_in_batch)
        loss = self.balanced(loss, model, inputs, outputs)
        return (loss, outputs) if return_outputs else loss

    def balanced(self, loss: Any, model: Any, inputs: dict[str, Any], outputs: Any) -> Any:
        """The loss of a micro-batch with its term; `outputs` come from a forward with `ASKS` set."""
        shared = self.args.gradient_accumulation_steps
        if self.deterministic:  # gradients are summed over ranks here, otherwise averaged
            shared *= self.accelerator.num_processes
        return loss + self.balance / shared * term(model, inputs, outputs).to(loss.device)


def term(model: Any, inputs: dict[str, Any], outputs: Any) -> Any:
    """transformers' term for a micro-batch, a scalar. It learns about padding from a mask, which packed rows do not
    have: if they are padded, the term is computed from the tokens that are not padding."""
    positions = inputs.get("position_ids")
    if positions is None or inputs.get("attention_mask") is not None or positions.dim() != 2:
        return outputs.aux_loss
    import torch

    follows = torch.nn.functional.pad(positions[:, 1:], (0, 1))
    real = (positions.gt(0) | follows.eq(1)).flatten()  # padding is at position 0, as a row's first token is
    inner = without_adapters(model)
    of_families = (getattr(sys.modules[type(module).__module__], COMPUTES, None) for module in inner.modules())
    compute: Any = next(filter(None, of_families))
    logits = tuple(layer.flatten(0, -2)[real.to(layer.device)] for layer in outputs.router_logits)
    chosen = inner.config.get_text_config().num_experts_per_tok
    return compute(logits, logits[0].shape[-1], chosen)


def check_balance(model: Any) -> None:
    """Raise ConfigError for a model in which transformers has no term that balances experts."""
    inner = without_adapters(model)
    # In an omni model, the trained module is an inner one with a forward of its own.
    forwards = (inspect.signature(type(module).forward).parameters for module in inner.modules())
    if not any(ASKS in taken and "labels" in taken for taken in forwards):
        raise ConfigError(
            f"--router-aux-loss-coef: transformers has no load-balancing loss for the experts of"
            f" {type(inner).__name__}."
            " Leave it out."
        )
