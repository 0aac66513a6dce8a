"""Metrics for labels, as sums over rows: summed over batches and ranks, they equal those of one process."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from shardproof.data.forms.labels import REGRESSION, SINGLE, Labels


class LabelLoss:
    """The loss for labels, in fp32: cross entropy, binary cross entropy for each label, or the squared error. It is the
    mean over the labels of a row, summed over rows and divided by the number of rows in the step.

    These are the losses of sequence classification models in transformers for the same `problem_type`.
    """

    def __init__(self, labels: Labels) -> None:
        self.labels = labels

    def __call__(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs["logits"][: len(labels)].float()  # (rows, names); no rows in a batch whose rows are all lost
        rows = len(labels) if num_items_in_batch is None else num_items_in_batch
        if self.labels.problem == SINGLE:
            return functional.cross_entropy(logits, labels, reduction="sum") / rows
        off = functional.mse_loss if self.labels.problem == REGRESSION else functional.binary_cross_entropy_with_logits
        return off(logits, labels, reduction="sum") / (rows * logits.shape[1])


def width(labels: Labels) -> int:
    """The number of sums."""
    return 7 * len(labels.names) if labels.problem == REGRESSION else 2 + 3 * len(labels.names)


def sums(labels: Labels, logits: torch.Tensor, given: torch.Tensor) -> list[float]:
    """The sums for a batch of logits (rows, names), with labels from `collate_labelled`."""
    logits, given, count = logits[: len(given)].detach().cpu().double(), given.cpu(), len(labels.names)
    if labels.problem == REGRESSION:
        given = given.double()
        each = torch.ones_like(given), (logits - given).abs(), logits, given, logits**2, given**2, logits * given
        return torch.stack([part.sum(0) for part in each]).flatten().tolist()
    if labels.problem == SINGLE:
        said, true = (functional.one_hot(numbers, count).bool() for numbers in (logits.argmax(-1), given))
    else:
        said, true = logits > 0, given > 0.5
    right = (said == true).all(-1).sum()
    per_label = torch.stack([(said & true).sum(0), said.sum(0), true.sum(0)])
    return [float(right), float(len(given)), *per_label.flatten().double().tolist()]


def means(labels: Labels, added: list[float]) -> dict[str, float]:
    """The metrics from the sums over all rows.

    Returns: for classification `accuracy`, the share of rows with all labels right, and `macro_f1`, the mean F1 over
        labels that occur; for regression `mae`, the mean absolute error, and `pearson`, the correlation.
    """
    if labels.problem == REGRESSION:
        count = len(labels.names)
        columns = [added[i::count] for i in range(count)]  # the sums of each name
        return {
            "mae": _mean([off / rows if rows else 0.0 for rows, off, *_ in columns]),
            "pearson": _mean([_pearson(rows, *moments) for rows, _, *moments in columns]),
        }
    right, rows, *rest = added
    count = len(labels.names)
    both, said, true = rest[:count], rest[count : 2 * count], rest[2 * count :]
    scores = [2 * b / (s + t) for b, s, t in zip(both, said, true, strict=True) if s + t]
    return {"accuracy": right / rows if rows else 0.0, "macro_f1": _mean(scores)}


def _pearson(rows: float, x: float, y: float, xx: float, yy: float, xy: float) -> float:
    """Pearson's correlation from sums of values, squares and products; 0 if one side is constant."""
    spread = (rows * xx - x * x) * (rows * yy - y * y)
    return (rows * xy - x * y) / math.sqrt(spread) if spread > 0 else 0.0


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
