"""FIPO: each token of an answer is weighted by how the probabilities of later tokens have changed (https://arxiv.org/abs/2603.19835)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 256  # tokens whose sums are computed by one matrix product
CAPPED = 0.8, 1.0  # weights of tokens of a bad answer that have already become too likely


@dataclass(frozen=True)
class Fipo:
    """How tokens are weighted.

    Attributes:
        decay_rate: the distance in tokens at which a later token counts half.
        clip_range: weights differ from 1 by at most this; 0: no limit.
        clip_high_only: whether they are never below 1.
        safety_threshold: in worse answers, tokens whose probability ratio exceeds this have a weight of at most 1.
        delta: tokens whose probability ratio exceeds this do not count for earlier ones; None: all count.
    """

    decay_rate: float
    clip_range: float
    clip_high_only: bool
    safety_threshold: float
    delta: float | None

    def weights(self, moved: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The weights of tokens (B, T), as constants.

        Args:
            moved: current log-probabilities minus those when the answers were generated (B, T).
            advantages: those of answers (B, 1).
            mask: the tokens that are learned (B, T).
        """
        ratios = moved.exp()
        counted = moved.masked_fill(mask == 0, 0.0)
        if self.delta is not None:
            counted = counted.masked_fill(ratios > self.delta, 0.0)
        found = discounted(counted, 2.0 ** (-1.0 / self.decay_rate)).exp()
        if self.clip_range:
            low = 1.0 if self.clip_high_only else 1.0 - self.clip_range
            found = found.clamp(low, 1.0 + self.clip_range)
        risky = (advantages < 0) & (ratios > self.safety_threshold)
        return torch.where(risky, found.clamp(*CAPPED), found)


def discounted(values: torch.Tensor, gamma: float) -> torch.Tensor:
    """The sum of each value (B, T) and the later ones, each times `gamma` to the power of its distance."""
    found, rest = torch.empty_like(values), values.new_zeros(len(values), 1)
    for end in range(values.shape[1], 0, -BLOCK):
        start = max(0, end - BLOCK)
        places = torch.arange(end - start, dtype=values.dtype, device=values.device)
        decay = (gamma ** (places[:, None] - places)).tril()  # weight of a later position (rows) for an earlier one
        block = values[:, start:end] @ decay + rest * gamma ** (end - start - places)
        found[:, start:end], rest = block, block[:, :1]
    return found
