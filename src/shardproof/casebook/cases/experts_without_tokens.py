"""A mixture of experts: an expert that gets no token on a rank does not run there, and the order differs.

ZeRO-3 hangs after some steps, unless the class is marked as a leaf by hand; DDP misses gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.models import WIDTH, Net, Part, draw, numbers, plain_sgd
from shardproof.casebook.run import Run


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, h: Tensor, route: Tensor) -> Tensor:
        weights, out = self.gate(h).softmax(-1), h
        for index in route.unique().tolist():
            rows = (route == index)[:, None]
            out = out + rows * weights[:, index, None] * torch.tanh(self.experts[index](h))
        return out


class Mixture(Net):
    def __init__(self) -> None:
        super().__init__(depth=1)
        self.layers = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        h = self.encode(x)
        for layer in self.layers:
            h = layer(h, route)
        return self.head(h)


def batches(step: int, rank: int) -> list[Part]:
    """Four tokens for two of four experts, different ones on each rank."""
    (part,) = numbers(step, rank)
    route = torch.randint(0, 2, (4,), generator=draw(step, rank, 1)) + (2 * rank + step) % 3
    return [{**part, "route": route}]


def loss(run: Run, part: Part) -> Tensor:
    return F.mse_loss(run.model(part["x"], part["route"]), part["y"])


CASE = Case(
    users="train a mixture of experts in which an expert may get no token on a rank",
    classes=(9,),
    threads=("deepspeedai/DeepSpeed#7461", "deepspeedai/DeepSpeed#5066", "hiyouga/LlamaFactory#1998"),
    model=Mixture,
    loss=loss,
    batches=batches,
    optimizer=plain_sgd,
    diverges=True,
    remedies=(
        Remedy("find_unused_parameters=True", ("ddp",), {"find_unused_parameters": True}),
        Remedy("set_z3_leaf_modules(model, [Experts])", ("deepspeed-3",), {"leaf_modules": (Experts,)}),
    ),
)
