"""Text and image batches are mixed: some ranks run the vision tower, some run it twice (image and video), some never.

Hangs at some step, with ZeRO-3 and FSDP; every training framework patches models with a dummy image times zero.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.casebook.case import PEERS, Case, Remedy
from shardproof.casebook.models import WIDTH, Block, Net, Part, draw, numbers, plain_sgd
from shardproof.casebook.run import Run


class VisionLanguage(Net):
    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.ModuleList(Block() for _ in range(2))

    def see(self, image: Tensor) -> Tensor:
        for block in self.visual:
            image = block(image)
        return image.mean(0)

    def forward(self, x: Tensor, images: list[Tensor], least: int) -> Tensor:
        h = self.embed(x)
        for image in images:
            h = h + self.see(image)
        for _ in range(least - len(images)):
            h = h + self.see(torch.zeros(1, WIDTH)) * 0.0
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def batches(step: int, rank: int) -> list[Part]:
    """No image, one, or an image and a video, in turn."""
    (part,) = numbers(step, rank)
    count = (step + rank) % 3
    return [{**part, "images": [torch.randn(5, WIDTH, generator=draw(step, rank, i)) for i in range(count)]}]


def loss(run: Run, part: Part) -> Tensor:
    return F.mse_loss(run.model(part["x"], part["images"], run.options.get("least", 0)), part["y"])


CASE = Case(
    users="mix text, image and video batches, the vision tower trained",
    classes=(5,),
    threads=("deepspeedai/DeepSpeed#7170", "QwenLM/Qwen3-VL#126", "2U1/Llama3.2-Vision-Finetune#18"),
    model=VisionLanguage,
    loss=loss,
    batches=batches,
    optimizer=plain_sgd,
    diverges=True,
    remedies=(
        Remedy("find_unused_parameters=True", ("ddp",), {"find_unused_parameters": True}),
        Remedy("dummy images times zero, up to two in all", PEERS, {"least": 2}),
    ),
)
