"""AdaLoRA (arXiv 2303.10512) during a run: its ranks are reallocated after each step, and a term in the loss keeps its
matrices orthogonal. That term is the same size however many micro-batches and processes a step has."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_callback import TrainerCallback

from shardproof.train.options.tuners import ADALORA

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

AVERAGES = ("exp_avg_ipt", "exp_avg_unc")  # PEFT's running averages of how much each weight matters


def allocating(model: Any) -> Any:
    """The PEFT AdaLoRA model whose ranks are reallocated, or None."""
    inner = getattr(model, "base_model", None)
    return inner if hasattr(inner, "rankallocator") else None


class RanksMixin(Base):
    """Mixin for trainers: AdaLoRA as in the paper. Does nothing for any other model.

    PEFT adds its term to the loss that a model's forward returns: to that of each micro-batch, undivided, and not at
    all where the loss is computed from the logits. Here it gets a backward pass of its own, once per step.

    Adapters whose ranks were chosen by another run keep those ranks.
    """

    deterministic: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ranks = allocating(self.model)
        if self.ranks is not None:
            from peft.tuners.tuners_utils import BaseTuner

            self.ranks.forward = types.MethodType(BaseTuner.forward, self.ranks)
            if self._own.rank_pattern is None:  # adapters from --adapters keep their ranks
                self.add_callback(_MovesRanks(self.ranks))

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        weight = self._own.orth_reg_weight if self.ranks is not None else 0
        if not weight or not self.accelerator.sync_gradients:
            return loss
        term = weight * _apart_from_orthogonal(self.ranks)
        if self.deterministic:  # gradients are summed over processes here, otherwise averaged
            term = term / self.accelerator.num_processes
        self.accelerator.backward(term)
        return loss + term.detach()

    @property
    def _own(self) -> Any:
        return self.ranks.peft_config[self.ranks.trainable_adapter_name]

    def kept_by_rank(self) -> dict[str, Any]:
        if self.ranks is None:
            return {}
        averages = {name: getattr(self.ranks.rankallocator, name) for name in AVERAGES}
        return {ADALORA: {**averages, "rank_pattern": self._own.rank_pattern}}

    def take_kept_by_rank(self, kept: dict[str, Any]) -> None:
        for name, value in kept.get(ADALORA, {}).items():
            setattr(self._own if name == "rank_pattern" else self.ranks.rankallocator, name, value)
            if name in AVERAGES:
                self.ranks.rankallocator.ipt = dict(value)  # tells PEFT that the averages exist


class _MovesRanks(TrainerCallback):
    """Has PEFT score each rank after each step, while gradients still exist, and switch off the least important
    ones."""

    def __init__(self, ranks: Any) -> None:
        self.ranks = ranks

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.ranks.rankallocator.set_total_step(state.max_steps)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if not getattr(more.get("optimizer"), "step_was_skipped", False):  # fp16: the gradients were not finite
            self.ranks.update_and_allocate(state.global_step + 1)


def _apart_from_orthogonal(ranks: Any) -> torch.Tensor:
    """How far the A and B matrices are from orthogonal: the mean of the Frobenius norms, a scalar."""
    adapter, found = ranks.trainable_adapter_name, []
    for name, p in ranks.model.named_parameters():
        if name.endswith((f".lora_A.{adapter}", f".lora_B.{adapter}")):
            product = p @ p.T if ".lora_A." in name else p.T @ p
            found.append(torch.linalg.norm(product - torch.eye(len(product), device=p.device, dtype=product.dtype)))
    return torch.stack(found).mean()
