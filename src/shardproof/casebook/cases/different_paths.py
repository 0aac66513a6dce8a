"""Each rank's batch decides which of three branches runs.

ZeRO-3 and FSDP need every module called equally often on every rank. The ranks wait for each other silently, or gather
different modules at the same time and compute with each other's weights.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.models import Block, Net, Part, numbers, plain_sgd
from shardproof.casebook.run import Run


class Branches(Net):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.head(self.branches[branch](self.encode(x)))


def batches(step: int, rank: int) -> list[Part]:
    (part,) = numbers(step, rank)
    return [{**part, "branch": (step + rank) % 3}]


def loss(run: Run, part: Part) -> Tensor:
    return F.mse_loss(run.model(part["x"], part["branch"]), part["y"])


CASE = Case(
    users="let the data of a rank decide which part of the model runs",
    classes=(4,),
    threads=("deepspeedai/DeepSpeed#7998", "deepspeedai/DeepSpeed#5070"),
    model=Branches,
    loss=loss,
    batches=batches,
    optimizer=plain_sgd,
    diverges=True,
    remedies=(Remedy("find_unused_parameters=True", ("ddp",), {"find_unused_parameters": True}),),
)
