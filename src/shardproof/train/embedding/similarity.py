"""Losses over embeddings of length 1, and metrics of retrieval and correlation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

MARGIN = 0.5  # of the contrastive loss: the least distance (1 - cosine) of texts that do not match
AT_ONCE = 256  # queries compared with all texts at a time


class Embedded(NamedTuple):
    """The embeddings of a batch: queries and their positives, both (rows, width); negatives of all rows (n, width);
    keys of positives and negatives, which are the same for equal texts (rows + n,); and the scores of rows (rows,)."""

    queries: torch.Tensor
    positives: torch.Tensor
    negatives: torch.Tensor
    keys: torch.Tensor
    scores: torch.Tensor

    @classmethod
    def of(cls, texts: torch.Tensor, rows: int, keys: torch.Tensor, scores: torch.Tensor) -> Embedded:
        """From embeddings in the order of `collate_matches`, possibly followed by one that belongs to no row."""
        return cls(texts[:rows], texts[rows : 2 * rows], texts[2 * rows : rows + len(keys)], keys, scores)

    @classmethod
    def together(cls, batches: list[Embedded]) -> Embedded:
        """These batches as one."""
        rows = [len(batch.queries) for batch in batches]
        columns = [torch.cat(column) for column in zip(*batches, strict=True)]
        parts = [(batch.keys[:n], batch.keys[n:]) for batch, n in zip(batches, rows, strict=True)]
        keys = torch.cat([first for first, _ in parts] + [rest for _, rest in parts])
        return cls(columns[0], columns[1], columns[2], keys, columns[4])

    def similarities(self, some: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The similarities of some queries to every positive and negative of the batch, (queries, texts), and which of
        these texts do not count as negatives of a query because they are equal to its positive."""
        found = torch.cat([self.positives, self.negatives])
        similar = self.queries[some] @ found.T
        own = torch.arange(len(self.queries), device=similar.device)[some]
        equal = self.keys[own][:, None] == self.keys
        equal[torch.arange(len(own)), own] = False
        return similar, equal


def infonce(batch: Embedded, temperature: float) -> torch.Tensor:
    """The sum over rows of the cross entropy of finding the positive among all positives and negatives of the batch.

    Source: van den Oord et al., Representation Learning with Contrastive Predictive Coding (arXiv:1807.03748).
    """
    similar, equal = batch.similarities(slice(None))
    logits = (similar / temperature).masked_fill(equal, -torch.inf)
    return functional.cross_entropy(logits, torch.arange(len(logits), device=logits.device), reduction="sum")


def cosine_similarity(batch: Embedded) -> torch.Tensor:
    """The sum over rows of the squared difference of the similarity of its two texts and its score."""
    return ((batch.queries * batch.positives).sum(-1) - batch.scores).square().sum()


def contrastive(batch: Embedded) -> torch.Tensor:
    """The sum over rows of half the squared distance of its texts or, if its score is 0, of half the square of what the
    distance lacks to the margin.

    Source: Hadsell et al., Dimensionality Reduction by Learning an Invariant Mapping (CVPR 2006).
    """
    apart = 1 - (batch.queries * batch.positives).sum(-1)
    near = functional.relu(MARGIN - apart)
    return 0.5 * (batch.scores * apart.square() + (1 - batch.scores) * near.square()).sum()


def retrieval(batch: Embedded) -> dict[str, float]:
    """How well the queries find their positives among all positives and negatives of the batch.

    Returns: `accuracy`, the share of queries whose positive is nearest; `mrr`, the mean reciprocal rank of positives;
        `mean_pos`, the mean similarity of a query to its positive; `mean_neg`, to all other texts.
    """
    places, positive, negative, others = [], 0.0, 0.0, 0
    for start in range(0, len(batch.queries), AT_ONCE):
        similar, equal = batch.similarities(slice(start, start + AT_ONCE))
        own = torch.arange(len(similar), device=similar.device)
        mine = similar[own, start + own]
        equal[own, start + own] = True
        places.append(1 + ((similar > mine[:, None]) & ~equal).sum(-1))
        positive += float(mine.double().sum())
        negative += float(similar.double().masked_fill(equal, 0.0).sum())
        others += int((~equal).sum())
    place = torch.cat(places).double()
    return {
        "accuracy": float((place == 1).double().mean()),
        "mrr": float((1 / place).mean()),
        "mean_pos": positive / len(place),
        "mean_neg": negative / others if others else 0.0,
    }


def correlation(batch: Embedded) -> dict[str, float]:
    """The correlation of the similarity of the two texts of a row with its score: `pearson` and, over ranks,
    `spearman`."""
    similar = (batch.queries * batch.positives).sum(-1).double()
    scores = batch.scores.double()
    return {"pearson": _pearson(similar, scores), "spearman": _pearson(_ranks(similar), _ranks(scores))}


def _pearson(x: torch.Tensor, y: torch.Tensor) -> float:
    """Pearson's correlation; 0 if one side is constant."""
    x, y = x - x.mean(), y - y.mean()
    spread = float(x.norm() * y.norm())
    return float(x @ y) / spread if spread else 0.0


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """The ranks of values; equal values share the mean of their ranks."""
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    return (ends - (counts.double() - 1) / 2)[place]
