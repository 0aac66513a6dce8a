"""A block holds a frozen base in bfloat16 and adapters in float32.

A single flat buffer per unit cannot hold them: "Must flatten tensors with uniform dtype", "uniform requires_grad".
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardproof.casebook.case import Case
from shardproof.casebook.models import WIDTH, Net


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        base = self.base(h.to(torch.bfloat16)).float()
        return h + base + self.up(self.down(h))


def model() -> nn.Module:
    net = Net(depth=0)
    net.blocks = nn.ModuleList(Adapted() for _ in range(3))
    net.embed.requires_grad_(False)
    return net


CASE = Case(
    users="train adapters in float32 over a frozen base in bfloat16",
    classes=(26,),
    threads=("axolotl-ai-cloud/axolotl#1482", "huggingface/trl#1723", "pytorch/pytorch#104690"),
    model=model,
    # The base rounds to bfloat16: an input that differs in its last bit may round the other way.
    tolerance=1e-3,
)
