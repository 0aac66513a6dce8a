"""Text-only batches leave the vision blocks unused, so the forward adds `sum(p.sum() ...) * 0.0` over them.

Under DDP the dummy loss is what keeps unused parameters from being an error. Under ZeRO-3 the parameters are empty
when they are summed outside their own module, and backward fails: "invalid gradient at index 0 - got [0]".
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.models import Block, Net, Part, draw, numbers
from shardproof.casebook.run import Run


class VisionLanguage(Net):
    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        h = self.embed(x)
        if image is None:
            h = h + sum(p.sum() for p in self.visual.parameters()) * 0.0
        else:
            for block in self.visual:
                image = block(image)
            h = h + image
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def batches(step: int, rank: int) -> list[Part]:
    """Images in the second step only."""
    (part,) = numbers(step, rank)
    return [{**part, "image": torch.randn(4, 7, generator=draw(step, rank, 1)) if step == 1 else None}]


def loss(run: Run, part: Part) -> Tensor:
    return F.mse_loss(run.model(part["x"], part["image"]), part["y"])


CASE = Case(
    users="add a zero-weighted dummy loss over the parameters of an adapter or tower that a batch does not use",
    classes=(7,),
    threads=("modelscope/ms-swift#3262", "deepspeedai/DeepSpeed#7078", "huggingface/transformers#36387"),
    model=VisionLanguage,
    loss=loss,
    batches=batches,
    remedies=(Remedy("find_unused_parameters=True", ("ddp",), {"find_unused_parameters": True}),),
)
