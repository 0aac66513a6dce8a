"""Like `images_on_some_ranks`, with the tower frozen: there is no gradient to reduce, but FSDP hangs nevertheless.

The tower is a separate unit, which only the ranks with an image gather: an `_ALLGATHER_BASE` watchdog, or a stall of
thirty minutes.
"""

from __future__ import annotations

import torch
from torch import nn

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.cases.images_on_some_ranks import VisionLanguage, loss
from shardproof.casebook.models import WIDTH, Part, draw, numbers


def model() -> nn.Module:
    net = VisionLanguage()
    net.visual.requires_grad_(False)
    return net


def batches(step: int, rank: int) -> list[Part]:
    (part,) = numbers(step, rank)
    images = [torch.randn(5, WIDTH, generator=draw(step, rank, 1))] if (step + rank) % 2 else []
    return [{**part, "images": images}]


CASE = Case(
    users="mix text and image batches, the vision tower frozen",
    classes=(6,),
    threads=("huggingface/transformers#37186", "verl-project/verl#2204", "hiyouga/EasyR1#468"),
    model=model,
    loss=loss,
    batches=batches,
    diverges=True,
    remedies=(Remedy("a dummy image times zero", ("fsdp2", "deepspeed-3"), {"least": 1}),),
)
