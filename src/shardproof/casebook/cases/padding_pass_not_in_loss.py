"""Ranks have unequal numbers of chunks; those with fewer run the model on padding, and leave the output out of the
loss.

The forward passes match, the backward passes do not: under ZeRO-3 the other ranks wait until the communicator times
out. The public fix is to add the padding's output times zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shardproof.casebook.case import PEERS, Case, Remedy
from shardproof.casebook.models import CLASSES, FEATURES, Net, Part, draw
from shardproof.casebook.run import Run

MOST = 3


def batches(step: int, rank: int) -> list[Part]:
    g = draw(step, rank)
    chunks = MOST - (step + rank) % 2
    return [{"x": torch.randn(chunks, 4, FEATURES, generator=g), "y": torch.randn(chunks, 4, CLASSES, generator=g)}]


def loss(run: Run, part: Part) -> Tensor:
    total = torch.zeros(())
    for x, y in zip(part["x"], part["y"], strict=True):
        total = total + F.mse_loss(run.model(x), y) / MOST
    for _ in range(MOST - len(part["x"])):
        padding = run.model(torch.zeros(4, FEATURES))
        if "zero" in run.options:
            total = total + padding.sum() * 0.0
    return total


CASE = Case(
    users="pad the chunks of a GRPO batch with forward passes that do not enter the loss",
    classes=(8,),
    threads=("modelscope/ms-swift#8102",),
    model=Net,
    loss=loss,
    batches=batches,
    diverges=True,
    remedies=(
        Remedy(
            "the padding's output times zero",
            PEERS,
            {"zero": 1},
        ),
    ),
)
