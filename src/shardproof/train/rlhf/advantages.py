"""GRPO with advantages that TRL does not have: other baselines and scales, the KL to the reference in the reward, and a
teacher's judgement of each token.

Rewards are gathered from all ranks before advantages are computed, so these are the same on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head, nanstd

from shardproof.train.rlhf.chord import Experts
from shardproof.train.rlhf.fipo import Fipo
from shardproof.train.rlhf.rewards import unrewarded
from shardproof.train.rlhf.teachers import TeacherServer
from shardproof.train.rlhf.variants import OF_REWARDS
from shardproof.zero.device import widest_float


@dataclass
class GrpoConfig(GRPOConfig):
    """GRPO's arguments, and those for its advantages.

    Attributes:
        advantage_estimator: what an answer is compared with, see `advantages_of`.
        kl_in_reward: whether the distance to the reference is subtracted from the reward of an answer instead of being
            part of the loss.
        teacher_kl_coef: the weight of the teacher's judgement of each token.
    """

    advantage_estimator: str = field(default="grpo")
    kl_in_reward: bool = field(default=False)
    teacher_kl_coef: float = field(default=1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_generations_eval == 1:  # TRL requires at least two answers to a prompt, and was given a whole batch
            self.num_generations = 1


class ByDistance(GRPOTrainer):
    """GRPO's trainer, which with `kl_in_reward` subtracts the distance to the reference from rewards."""

    kl_in_reward: bool
    beta: float
    _asked_logps: tuple[torch.Tensor, torch.Tensor] | None = None  # tokens of answers, and their log-probabilities

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._rewards: torch.Tensor = super()._calculate_rewards(*args, **kwargs)
        return self._rewards

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        beta, self.beta = self.beta, 0.0 if self.kl_in_reward else self.beta
        try:
            return super()._compute_loss(model, inputs)  # type: ignore[no-any-return]
        finally:
            self.beta = beta

    def _weighted(self) -> torch.Tensor:
        """The total reward of each answer on all ranks (N,); NaN where no judge gave one."""
        return weighted(self._rewards, self.reward_weights)

    def _mine(self, of_all: torch.Tensor, rows: int) -> torch.Tensor:
        """This rank's answers, `rows` of them, from a tensor over those of all ranks."""
        return of_all[self.accelerator.process_index * rows :][:rows]

    def _old_logps(self, batch: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities of the tokens of answers when they were written (B, T)."""
        known: torch.Tensor | None = batch.get("old_per_token_logps")
        if known is None:  # computed once, though the distance and the teacher may both need them
            if self._asked_logps is None or self._asked_logps[0] is not batch["completion_ids"]:
                self._asked_logps = batch["completion_ids"], self._logps(self.model, batch)
            known = self._asked_logps[1]
        return known

    def _logps(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        """A model's log-probabilities of the tokens of answers (B, T)."""
        ids, mask = joined(batch)
        keep, size = batch["completion_ids"].size(1), self.args.per_device_train_batch_size
        with torch.no_grad():
            logps: torch.Tensor = self._get_per_token_logps_and_entropies(model, ids, mask, keep, size)[0]
        return logps

    def _distance(self, batch: dict[str, Any], mask: torch.Tensor) -> torch.Tensor:
        """The distance to the reference for the tokens in `mask` (B, T): the first-order estimate, as in TRL's RLOO."""
        distance = (self._old_logps(batch) - batch["ref_per_token_logps"]) * mask
        self._record("kl", distance.sum(), mask.sum())
        return distance

    def _record(self, name: str, total: torch.Tensor, count: torch.Tensor) -> None:
        sums = self.accelerator.reduce(torch.stack([total.detach(), count]), reduction="sum")
        mode = "train" if self.model.training else "eval"
        self._metrics[mode][name].append((sums[0] / sums[1].clamp(min=1.0)).item())


class GrpoTrainer(ByDistance):
    """GRPO's trainer with one of these estimators and, if there is a teacher, its judgement of each token: how much
    more probable the teacher finds it, which minimises the reverse KL divergence on the model's own answers
    (https://arxiv.org/abs/2306.08543). `experts`, if given, are learned beside answers, and `fipo` weights the tokens
    of answers."""

    teacher_model: Any

    def __init__(
        self,
        *args: Any,
        teacher_model: Any = None,
        experts: Experts | None = None,
        fipo: Fipo | None = None,
        **kwargs: Any,
    ) -> None:
        self.experts, self.fipo = experts, fipo
        self._weighed: dict[str, Any] | None = None  # the inputs of the loss, with FIPO
        self.kl_in_reward = kwargs["args"].kl_in_reward
        super().__init__(*args, **kwargs)
        self.teacher_model = teacher_model
        if isinstance(teacher_model, torch.nn.Module):
            add_fused_lm_head(teacher_model, temperature=self.temperature)
            self.teacher_model = self.accelerator.prepare_model(teacher_model, evaluation_mode=True)

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        self._weighed = inputs = {**inputs} if self.fipo is not None else inputs
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self._weighed = None
        learns = self.experts is not None and self.model.training
        return self.experts.joined(self, model, loss) if learns else loss  # type: ignore[union-attr]

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """With FIPO, weights the advantages that TRL is about to read. TRL calls this before it multiplies its clipped
        losses by them."""
        found, batch = super()._get_per_token_logps_and_entropies(*args, **kwargs), self._weighed
        if batch is not None and self.fipo is not None:
            logps, mask = found[0].detach(), batch["completion_mask"] * batch.get("tool_mask", 1)
            old, advantages = batch.get("old_per_token_logps"), batch["advantages"][:, None]
            weights = self.fipo.weights(logps - (logps if old is None else old), advantages, mask)
            batch["advantages"] = advantages * weights
            self._record("fipo/influence_weight", (weights * mask).sum(), mask.sum())
        return found

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.reward_func_names == [unrewarded.__name__]:
            self._forget_rewards()
        mask = (output["completion_mask"] * output.get("tool_mask", 1)).float()
        if self.args.advantage_estimator != "grpo" or self.kl_in_reward:
            output["advantages"] = self._compared(output, mask)
        if self.teacher_model is not None:
            of_tokens = self.args.teacher_kl_coef * self._taught(output, mask)
            output["advantages"] = (output["advantages"][:, None] + of_tokens) * mask
            mean = output["advantages"].sum(dim=1) / mask.sum(dim=1).clamp(min=1)
            self._tell(self.accelerator.gather(mean))
        self._asked_logps = None
        return output

    def _forget_rewards(self) -> None:
        """Remove TRL's metrics for rewards if there are none."""
        figures = self._metrics["train" if self.model.training else "eval"]
        for name in [name for name in figures if name.startswith(OF_REWARDS)]:
            del figures[name]
        self._logs["rewards"].clear()

    def _taught(self, batch: dict[str, Any], mask: torch.Tensor) -> torch.Tensor:
        """How much more probable the teacher finds the tokens in `mask` (B, T)."""
        if isinstance(self.teacher_model, TeacherServer):
            theirs = self.teacher_model.logps(*joined(batch), batch["completion_ids"].size(1))
        else:
            theirs = self._logps(self.teacher_model, batch)
        more = (theirs - self._old_logps(batch)) * mask
        self._record("teacher_kl", (more.exp() - more - 1).sum(), mask.sum())  # an estimate that is never below 0
        return more

    def _compared(self, batch: dict[str, Any], mask: torch.Tensor) -> torch.Tensor:
        """The advantages of this rank's answers (B,), which are logged in place of TRL's."""
        rewards, estimator = self._weighted(), self.args.advantage_estimator
        if self.kl_in_reward and self.beta:
            rewards = rewards - self.beta * self.accelerator.gather(self._distance(batch, mask).sum(dim=1))
        answers = self.num_generations if self.model.training else self.num_generations_eval
        advantages = advantages_of(rewards, answers, estimator, self.args.scale_rewards)
        self._tell(advantages)
        return self._mine(advantages, len(mask))

    def _tell(self, advantages: torch.Tensor) -> None:
        """Log these advantages, of all ranks, in place of TRL's own."""
        told = self._logs["advantages"]
        for _ in advantages:
            told.pop()
        told.extend(advantages.tolist())


def advantages_of(rewards: torch.Tensor, answers: int, estimator: str, scale: str) -> torch.Tensor:
    """How much better each answer is than others (N,); 0 for answers without a reward.

    Args:
        rewards: those of all answers (N,), with the answers to a question next to each other; NaN for none.
        answers: number of answers to each question.
        estimator: `grpo` compares with the mean of a question's answers; `rloo` with that of the others
            (https://arxiv.org/abs/2402.14740); `reinforce_plus_plus` is `grpo`, but scales by the deviation of these
            differences (https://arxiv.org/abs/2501.03262).
        scale: divide by the deviation over a question's answers (`group`), over all (`batch`), or not at all (`none`).
    """
    grouped = rewards.view(-1, answers)
    found = grouped - grouped.nanmean(dim=1, keepdim=True)
    if estimator == "rloo":
        known = (~grouped.isnan()).sum(dim=1, keepdim=True)
        found = found * known / (known - 1)
    if scale != "none":
        scaled = found if estimator == "reinforce_plus_plus" else grouped
        found = found / ((nanstd(scaled) if scale == "batch" else nanstd(scaled, dim=1, keepdim=True)) + 1e-4)
    return found.view(-1).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def weighted(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The total rewards of answers (N,), from those of each judge (N, judges); NaN where no judge gave one. In the
    widest type: in fp32 the mean of eight times 0.8 is not 0.8, and such differences are divided by an equally small
    deviation."""
    wide = rewards.to(widest_float(rewards.device))
    return (wide * weights.to(wide)).nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), torch.nan)


def joined(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts, each followed by its answer: ids and mask (B, P + T)."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    return ids, torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
