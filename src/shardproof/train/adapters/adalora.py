"""AdaLoRA (arXiv 2303.10512) over a run: its ranks move after each step, and its matrices are kept orthogonal by a term
that is as large in a step of many micro-batches, on many processes, as in one."""

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

AVERAGES = ("exp_avg_ipt", "exp_avg_unc")  # of how much each weight matters, which PEFT's allocator keeps


def allocating(model: Any) -> Any:
    """PEFT's AdaLoRA of a model whose ranks are moved, or None."""
    inner = getattr(model, "base_model", None)
    return inner if hasattr(inner, "rankallocator") else None


class RanksMixin(Base):
    """Between a trainer and what it is of: AdaLoRA as the paper has it, and nothing where another model is trained.

    PEFT adds its term to the loss that a model's forward returns: to each micro-batch's, undivided, and not at all
    where the loss is computed of the logits. Here it is a backward pass of its own, once a step.

    Adapters whose ranks were chosen by another run are trained with these.
    """

    deterministic: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ranks = allocating(self.model)
        if self.ranks is not None:
            from peft.tuners.tuners_utils import BaseTuner

            self.ranks.forward = types.MethodType(BaseTuner.forward, self.ranks)
            if self._own.rank_pattern is None:  # those of --adapters keep the ranks that they have
                self.add_callback(_MovesRanks(self.ranks))

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        weight = self._own.orth_reg_weight if self.ranks is not None else 0
        if not weight or not self.accelerator.sync_gradients:
            return loss
        term = weight * _apart_from_orthogonal(self.ranks)
        if self.deterministic:  # gradients of ranks are added up, and else averaged
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
                self.ranks.rankallocator.ipt = dict(value)  # of which PEFT sees that there are averages


class _MovesRanks(TrainerCallback):
    """Has PEFT weigh what each rank is worth behind each step, while there are gradients, and turn off the least."""

    def __init__(self, ranks: Any) -> None:
        self.ranks = ranks

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.ranks.rankallocator.set_total_step(state.max_steps)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if not getattr(more.get("optimizer"), "step_was_skipped", False):  # in fp16, gradients that are not finite
            self.ranks.update_and_allocate(state.global_step + 1)


def _apart_from_orthogonal(ranks: Any) -> torch.Tensor:
    """How far the matrices on both sides are from orthogonal: the mean of Frobenius norms, a scalar."""
    adapter, found = ranks.trainable_adapter_name, []
    for name, p in ranks.model.named_parameters():
        if name.endswith((f".lora_A.{adapter}", f".lora_B.{adapter}")):
            product = p @ p.T if ".lora_A." in name else p.T @ p
            found.append(torch.linalg.norm(product - torch.eye(len(product), device=p.device, dtype=product.dtype)))
    return torch.stack(found).mean()
