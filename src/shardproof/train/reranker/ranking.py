"""Losses over the scores of a query's texts, and ranking metrics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from shardproof.data.forms.matches import RANKING_MEASURES as MEASURES


def pointwise(scores: torch.Tensor, relevant: torch.Tensor, counts: Sequence[int], temperature: float) -> torch.Tensor:
    """The sum over pairs of the cross entropy of whether a text answers its query."""
    return functional.binary_cross_entropy_with_logits(scores, relevant, reduction="sum")


def listwise(scores: torch.Tensor, relevant: torch.Tensor, counts: Sequence[int], temperature: float) -> torch.Tensor:
    """The sum over positives of the cross entropy of finding each one among the negatives of its row.

    Source: Cao et al., Learning to Rank: From Pairwise Approach to Listwise Approach (ICML 2007).
    """
    total = scores.sum() * 0.0
    for some, right in zip((scores / temperature).split(list(counts)), relevant.split(list(counts)), strict=True):
        positives, negatives = some[right > 0.5], some[right <= 0.5]
        against = torch.cat([positives[:, None], negatives.expand(len(positives), -1)], dim=1)
        total = total - against.log_softmax(-1)[:, 0].sum()
    return total


def sums(scores: torch.Tensor, relevant: torch.Tensor, counts: Sequence[int]) -> list[float]:
    """The number of rows, and the sums of MEASURES over them: whether a positive ranks first, the reciprocal rank of
    the first positive, and the normalised discounted cumulative gain. Among equal scores, negatives rank first."""
    added = [0.0] * (1 + len(MEASURES))
    scores, relevant = scores.detach().cpu().double(), relevant.cpu()
    for some, right in zip(scores.split(list(counts)), relevant.split(list(counts)), strict=True):
        order = sorted(range(len(some)), key=lambda i: (-float(some[i]), float(right[i])))
        gains = right[order].double()
        places = torch.arange(2, len(some) + 2, dtype=torch.float64).log2()
        best = gains.sort(descending=True).values
        first = 1 + int(gains.argmax())
        found = (1.0, float(first == 1), 1 / first, float((gains / places).sum() / (best / places).sum()))
        added = [a + b for a, b in zip(added, found, strict=True)]
    return added


def means(added: Sequence[float]) -> dict[str, float]:
    """The means from the sums over all rows."""
    rows, *rest = added
    return {name: value / rows if rows else 0.0 for name, value in zip(MEASURES, rest, strict=True)}
