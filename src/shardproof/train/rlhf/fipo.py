"""FIPO: each token of an answer weighs by what has become of the tokens behind it (https://arxiv.org/abs/2603.19835)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 256  # tokens whose sums are one product
CAPPED = 0.8, 1.0  # weights of tokens that a bad answer has made too likely already


@dataclass(frozen=True)
class Fipo:
    """How tokens are weighed.

    Attributes:
        decay_rate: so many tokens further a token counts half.
        clip_range: weights are within so much of 1; 0: any.
        clip_high_only: whether they are never below 1.
        safety_threshold: of a worse answer, tokens whose probability has grown by more weigh 1 at most.
        delta: tokens whose probability has grown by more do not count for those before them; None: all do.
    """

    decay_rate: float
    clip_range: float
    clip_high_only: bool
    safety_threshold: float
    delta: float | None

    def weights(self, moved: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Of tokens (B, T), as constants.

        Args:
            moved: log-probabilities of now less those of when answers were written (B, T).
            advantages: of answers (B, 1).
            mask: the tokens that are learnt (B, T).
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
    """The sum of each value (B, T) and those behind it, `gamma` to the power of the distance of each."""
    found, rest = torch.empty_like(values), values.new_zeros(len(values), 1)
    for end in range(values.shape[1], 0, -BLOCK):
        start = max(0, end - BLOCK)
        places = torch.arange(end - start, dtype=values.dtype, device=values.device)
        decay = (gamma ** (places[:, None] - places)).tril()  # of the later place (rows) for the earlier one
        block = values[:, start:end] @ decay + rest * gamma ** (end - start - places)
        found[:, start:end], rest = block, block[:, :1]
    return found
