"""Two losses over one forward, each with its own backward pass, before one step.

A wrapper that does its work in `engine.backward()` and expects a single call fails on the second, or reduces half.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from shardproof.casebook.case import PEERS, Case, Remedy
from shardproof.casebook.models import Net
from shardproof.casebook.run import Run


class TwoHeads(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.encode(x)
        return self.head(h), h


def train(run: Run) -> None:
    for _ in run.steps(3):
        for part in run.parts():
            out, hidden = run.model(part["x"])
            first, second = F.mse_loss(out, part["y"]), hidden.square().mean()
            if "sum" in run.options:
                run.backward(first + second)
            else:
                run.backward(first, retain_graph=True)
                run.backward(second)
            run.record("losses", first + second)
        run.step()


CASE = Case(
    users="call backward for each of two losses before one step",
    classes=(13,),
    threads=("deepspeedai/DeepSpeed#3539", "huggingface/diffusers#3342", "Lightning-AI/pytorch-lightning#19773"),
    model=TwoHeads,
    train=train,
    remedies=(Remedy("one backward of the sum", PEERS, {"sum": True}),),
)
