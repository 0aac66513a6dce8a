"""CHORD: expert rows, learned as in sft beside the answers of grpo (https://arxiv.org/abs/2508.11408).

The loss is `(1 - mu)` times that of grpo plus `mu` times the mean over the learned expert tokens of a step, however
these are distributed to micro-batches and ranks; `mu` depends on the step. The number of a step determines its rows, so
that a resumed run has the same rows as one that was not interrupted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from shardproof.data.forms.formats import SUPERVISED, Form, normalise
from shardproof.data.rows import read_rows
from shardproof.errors import ConfigError, DataError
from shardproof.train import run
from shardproof.train.options.rlhf_config import RlhfConfig

OPTION = "--chord-sft-dataset"
ROWS = Form(partial(normalise, weighs=True), SUPERVISED.expected)


@dataclass(frozen=True)
class Schedule:
    """The weight of expert rows at each step: it rises from 0 in `warmup` steps, and falls to `valley` along half a
    cosine in `decay` steps."""

    peak: float
    valley: float
    warmup: int
    decay: int

    def mu(self, step: int) -> float:
        """The weight after `step` steps."""
        if step < self.warmup:
            return self.peak * step / self.warmup
        if step >= self.warmup + self.decay:
            return self.valley
        share = (1 + math.cos(math.pi * (step - self.warmup) / self.decay)) / 2
        return self.valley + (self.peak - self.valley) * share


def check_chord(config: RlhfConfig) -> None:
    """Raise ConfigError for CHORD options that are incomplete or contradict each other."""
    if not config.chord_sft_dataset:
        return
    if config.chord_mu_peak is None:
        raise ConfigError(
            f"{OPTION} needs --chord-mu-peak, the largest weight of its rows in the loss, for example 0.9."
        )
    if not config.chord_mu_peak:
        raise ConfigError(f"--chord-mu-peak 0: nothing would be learned from {OPTION}. Leave both out.")
    peak, valley = config.chord_mu_peak, config.chord_mu_valley
    if valley is not None and valley > peak:
        raise ConfigError(
            f"--chord-mu-valley {valley:g} is above --chord-mu-peak {peak:g}, but the weight falls from the peak to"
            f" the valley."
        )
    if config.chord_mu_decay_steps and valley in (None, peak):
        raise ConfigError(
            f"--chord-mu-decay-steps {config.chord_mu_decay_steps}: the weight falls to --chord-mu-valley. Give one"
            f" below {peak:g}, or leave both out."
        )
    if valley not in (None, peak) and not config.chord_mu_decay_steps:
        raise ConfigError(
            f"--chord-mu-valley {valley:g}: the weight falls to it over --chord-mu-decay-steps, which is 0. Set"
            f" that, or leave the valley out."
        )
    if config.sequence_parallel > 1:
        raise ConfigError(
            f"{OPTION} and --sequence-parallel: expert rows cannot be split between processes. Leave one of them out."
        )


def room_of_experts(config: RlhfConfig) -> int:
    """The most tokens in an expert row: as many as in a prompt and its answer."""
    return config.max_length + config.max_completion_length


def encoded_experts(config: RlhfConfig, tokenizer: Any) -> Any:
    """The expert rows, encoded as for sft, or None.

    Raises:
        DataError: a file is missing, or a row is bad or has files, or all are too long.
        ConfigError: a row has more tokens than the model has positions.
    """
    from shardproof.data.encoding.encode import encode_rows
    from shardproof.train.model.positions import positions_for

    if not config.chord_sft_dataset:
        return None
    only = {"dataset": config.chord_sft_dataset, "val_dataset": [], "val_split": 0.0, "interleave_prob": []}

    def reader(*args: Any, **how: Any) -> Any:
        return read_rows(*args, **{**how, "others": True})  # --columns may be meant for --dataset

    how: Any = {"max_length": room_of_experts(config), "truncation": config.truncation, "system": config.system}
    try:
        rows, _ = run.read(config.model_copy(update=only), reader, ROWS)
        encoded = encode_rows(rows, tokenizer, bad_rows=config.bad_rows, **how)
    except DataError as error:
        raise DataError(f"{OPTION}: {error}") from None
    longest = max(map(len, encoded["input_ids"]))
    if limit := positions_for(config.model, longest, config.trust_remote_code):
        raise ConfigError(
            f"{OPTION}: a row has {longest} tokens, and {config.model} was trained on only {limit} positions."
        )
    return encoded


class Experts:
    """The expert rows that TRL's GRPO trainer learns beside its answers.

    Args:
        rows: rows with `input_ids` and `labels`.
        batch: how many of them a micro-batch has on each process.
        schedule: the schedule of their weight.
        phi: whether each token is weighted by how unsure the model is of it.
        pad: the padding token.
        seed: the seed of their order.
    """

    def __init__(self, rows: Any, batch: int, schedule: Schedule, phi: bool, pad: int, seed: int) -> None:
        self._rows, self._batch, self._schedule, self._phi, self._pad = rows, batch, schedule, phi, pad
        self._seed, self._at = seed, (-1, 0)
        self._step: tuple[list[dict[str, Any]], int] = [], 0
        self._plain: bool | None = None
        self._order, self._learnt = cache(self._drawn), cache(self._counted)

    def joined(self, trainer: Any, model: Any, loss: Any) -> Any:
        """The loss of a micro-batch of grpo, combined with that of its expert rows."""
        step = trainer.state.global_step
        micro = self._at[1] + 1 if self._at[0] == step else 0
        self._at, mu = (step, micro), self._schedule.mu(step)
        trainer._metrics["train"]["chord/mu"].append(mu)
        if not mu:
            return loss
        ranks, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
        if micro == 0:
            self._step = self._of_step(step, trainer, ranks, rank)
        mine, learnt = self._step[0][micro * self._batch :][: self._batch], self._step[1]
        found = self._summed(model, mine, trainer.args.device)
        told = found * trainer.current_gradient_accumulation_steps  # TRL logs the mean over micro-batches
        trainer._record("chord/sft_loss", told, found.new_tensor(learnt / ranks))
        return (1 - mu) * loss + mu * found * ranks / max(learnt, 1)  # gradients are averaged over ranks

    def _of_step(self, step: int, trainer: Any, ranks: int, rank: int) -> tuple[list[dict[str, Any]], int]:
        """The rows of a rank in a step, micro-batch by micro-batch, and the number of learned tokens on all ranks. The
        last step of an epoch of prompts may have fewer."""
        begin = step * trainer.args.gradient_accumulation_steps * ranks * self._batch
        many = trainer.current_gradient_accumulation_steps * ranks * self._batch
        rounds = (divmod(place, len(self._rows)) for place in range(begin, begin + many))
        places = [self._order(number)[place] for number, place in rounds]
        mine = [place for n, place in enumerate(places) if n // self._batch % ranks == rank]
        return [self._rows[place] for place in mine], sum(map(self._learnt, places))

    def _counted(self, place: int) -> int:
        """How many tokens of a row are learned."""
        labels = self._rows[place]["labels"][1:]
        return len(labels) - labels.count(-100)

    def _drawn(self, number: int) -> list[int]:
        """The order of the rows in a pass over all of them."""
        import torch

        draws = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        return torch.randperm(len(self._rows), generator=draws).tolist()

    def _summed(self, model: Any, rows: list[dict[str, Any]], device: Any) -> Any:
        """The weighted sum of the losses of the learned tokens."""
        import torch

        from shardproof.data.encoding.encode import collate
        from shardproof.data.encoding.weights import WEIGHTS
        from shardproof.train.losses.chunked import chunked_cross_entropy
        from shardproof.train.losses.shortcuts import check_logits, head_of, hidden_states

        batch = {name: value.to(device) for name, value in collate(rows, self._pad).items()}
        labels, weights = batch.pop("labels"), batch.pop(WEIGHTS, None)
        if self._plain is None:
            try:
                check_logits(model, batch, OPTION)
                self._plain = True
            except ConfigError:  # the model caps its logits, or has no separate head: compute full logits
                self._plain = False
        learnt, weigh = labels[:, 1:].ne(-100), unsure if self._phi else None
        targets, shares = labels[:, 1:][learnt], None if weights is None else weights[:, 1:][learnt]
        if self._plain:
            hidden, head = hidden_states(model, batch)[:, :-1][learnt], head_of(model)
            return chunked_cross_entropy(hidden, head.weight, head.bias, targets, 1, weigh=weigh, shares=shares)
        losses = torch.nn.functional.cross_entropy(
            model(**batch, use_cache=False).logits[:, :-1][learnt].float(), targets, reduction="none"
        )
        losses = losses if weigh is None else losses * weigh(-losses.detach())
        return (losses if shares is None else losses * shares).sum()


def unsure(odds: Any) -> Any:
    """How unsure a model is of tokens, from their log-probabilities: `p (1 - p)`."""
    chances = odds.exp()
    return chances * (1 - chances)


def experts_of(config: RlhfConfig, rows: Any, pad: int) -> Experts | None:
    """The experts for these options, with the rows from `encoded_experts`."""
    if rows is None:
        return None
    peak = float(config.chord_mu_peak or 0.0)
    valley = peak if config.chord_mu_valley is None else config.chord_mu_valley
    schedule = Schedule(peak, valley, config.chord_mu_warmup_steps, config.chord_mu_decay_steps)
    return Experts(
        rows, config.chord_sft_per_device_train_batch_size, schedule, config.chord_enable_phi_function, pad, config.seed
    )
