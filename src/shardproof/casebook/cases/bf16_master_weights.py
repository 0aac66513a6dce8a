"""Computing in bfloat16 with small steps: weights near one move by less than bfloat16 can represent.

If the master weights are bfloat16 too, they never move, and users raise the learning rate fourfold. Stage 0 in bfloat16
was a separate code path in DeepSpeed, with its own scaling.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardproof.casebook.case import Case
from shardproof.casebook.models import Part
from shardproof.casebook.run import Run


class Ones(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(2))
        for p in self.parameters():
            nn.init.ones_(p)

    def forward(self, x: Tensor) -> Tensor:
        return sum((block(x) for block in self.blocks), x)


def batches(step: int, rank: int) -> list[Part]:
    return [{"x": torch.ones(4, 5)}]


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=5e-3)


def train(run: Run) -> None:
    for _ in run.steps(12):
        for part in run.parts():
            with run.precision():
                out = run.model(part["x"].to(torch.bfloat16) if run.engine.casts_inputs else part["x"])
            run.backward(out.float().mean())
        run.step(look=False)


CASE = Case(
    users="compute in bfloat16 and expect small updates to add up",
    classes=(30, 33),
    threads=("huggingface/accelerate#2624", "huggingface/accelerate#3979", "deepspeedai/DeepSpeed#7837"),
    model=Ones,
    train=train,
    batches=batches,
    optimizer=optimizer,
    clip=None,
    bf16=True,
    tolerance=1e-3,
)
