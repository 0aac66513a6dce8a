"""Proximal policy optimisation, for which TRL no longer has a trainer: its GRPO with a value model.

Sampling, rewards, the reference and the clipped loss of the policy come from GRPO. Specific to PPO: a value model
predicts, before each token, the reward of the rest of the answer; a token's advantage is how much better the outcome
was (generalised advantage estimation, https://arxiv.org/abs/1506.02438); and the distance to the reference is
subtracted from the reward of each token (https://arxiv.org/abs/1909.08593) instead of being part of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from trl import GRPOConfig

from shardproof.models.checkpointing import enable_checkpointing
from shardproof.train.rlhf.advantages import ByDistance, joined
from shardproof.zero.device import widest_float


@dataclass
class PpoConfig(GRPOConfig):
    """GRPO's arguments, and those of the value model.

    Attributes:
        beta: the weight of the distance to the reference, which is subtracted from a token's reward.
        gamma: the discount factor of rewards per token.
        gae_lambda: 0 looks one token ahead, 1 to the end of the answer.
        value_weight: the weight of the value model's loss.
        value_clip: how far a value may move from its value when the answer was generated.
    """

    beta: float = field(default=0.05)
    gamma: float = field(default=1.0)
    gae_lambda: float = field(default=0.95)
    value_weight: float = field(default=0.1)
    value_clip: float = field(default=0.2)


class PpoTrainer(ByDistance):
    """GRPO's trainer with a value model: a token classifier from transformers, with one label."""

    _tag_names = ("trl", "ppo")
    _name = "PPO"
    kl_in_reward = True

    def __init__(self, *args: Any, value_model: Any, **kwargs: Any) -> None:
        self.value_model: Any = value_model
        self.also_trained = (value_model,)
        for module in value_model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # token classifiers have dropout, but values must not be random
        super().__init__(*args, **kwargs)
        if self.args.gradient_checkpointing:
            how = self.args.gradient_checkpointing_kwargs or {}
            enable_checkpointing(self.value_model, how.get("use_reentrant", False))
        self.value_model.train()
        self.add_callback(_ZeroGradients(value_model))

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Adds parameter groups for the value model, as Trainer makes them for the policy."""
        optimizer = super().create_optimizer(*args, **kwargs)
        decayed = set(self.get_decay_parameter_names(self.value_model))
        named = [(name, p) for name, p in self.value_model.named_parameters() if p.requires_grad]
        for weight_decay, decays in ((self.args.weight_decay, True), (0.0, False)):
            parameters = [p for name, p in named if (name in decayed) is decays]
            optimizer.add_param_group({"params": parameters, "weight_decay": weight_decay})
        return optimizer

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """GRPO's batch, with an advantage for each token (B, T) in place of one for each answer (B,)."""
        output = super()._generate_and_score_completions(inputs)
        mask = output["completion_mask"].float()
        with torch.no_grad():
            values = self._values(output) * mask
        output["old_per_token_logps"] = self._old_logps(output)
        rewards = torch.zeros_like(mask)
        if self.beta:
            rewards -= self.beta * self._distance(output, mask)
        last = (mask.sum(dim=1) - 1).clamp(min=0).long()
        rewards[torch.arange(len(mask)), last] += self._mine(self._weighted(), len(mask)).nan_to_num(nan=0.0)
        advantages = over_tokens(rewards, values, mask, self.args.gamma, self.args.gae_lambda)
        returns = advantages + values
        return output | {"advantages": self._whitened(advantages, mask), "returns": returns, "values": values}

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        mask, returns, before = inputs["completion_mask"].float(), inputs["returns"], inputs["values"]
        values = self._values(inputs)
        bounded = before + (values - before).clamp(-self.args.value_clip, self.args.value_clip)
        errors = 0.5 * torch.max((values - returns) ** 2, (bounded - returns) ** 2) * mask
        self._record("value_loss", errors.sum(), mask.sum())
        # As in GRPO's default loss: a mean over the tokens of the full batch, on all ranks.
        tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if self.model.training:
            tokens = tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return loss + self.args.value_weight * errors.sum() / tokens

    def _values(self, batch: dict[str, Any]) -> torch.Tensor:
        """The predicted value of the rest before each token of the answer (B, T)."""
        ids, mask = joined(batch)
        values = self.value_model(input_ids=ids, attention_mask=mask, **self.beside(batch)).logits[..., 0].float()
        return values[:, -batch["completion_ids"].size(1) - 1 : -1]

    def beside(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Inputs of the models besides the tokens of a batch."""
        return {}

    def _whitened(self, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Advantages normalised to mean 0 and standard deviation 1 over the tokens of all ranks."""
        sums = torch.stack([mask.sum(), (advantages * mask).sum(), (advantages**2 * mask).sum()]).to(
            widest_float(mask.device)
        )
        count, total, squares = self.accelerator.reduce(sums, reduction="sum").tolist()
        mean = total / max(count, 1.0)
        spread = max(squares / max(count, 1.0) - mean**2, 0.0) ** 0.5
        return (advantages - mean) / (spread + 1e-8) * mask


def over_tokens(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, gae_lambda: float
) -> torch.Tensor:
    """Generalised advantage estimation over the tokens of answers (B, T), which end where the mask does."""
    advantages, ahead, after = (
        torch.zeros_like(rewards),
        rewards.new_zeros(len(rewards)),
        rewards.new_zeros(len(rewards)),
    )
    for t in reversed(range(rewards.size(1))):
        surprise = rewards[:, t] + gamma * after - values[:, t]
        ahead = (surprise + gamma * gae_lambda * ahead) * mask[:, t]
        after = values[:, t] * mask[:, t]
        advantages[:, t] = ahead
    return advantages


class _ZeroGradients(TrainerCallback):
    """Clears the gradients of the value model after each step, as Trainer does for its own model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.model.zero_grad()
