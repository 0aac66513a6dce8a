"""A rotary position table, computed in float32 from a float32 buffer, in a model that is trained in bfloat16.

An engine that casts buffers, or patches torch.arange, rounds positions above 256 to neighbouring ones: a higher loss
with long contexts, and no error.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shardproof.casebook.case import ZERO, Case, Remedy
from shardproof.casebook.models import WIDTH, Net
from shardproof.casebook.run import Run


class Rotary(Net):
    inverse: Tensor

    def __init__(self) -> None:
        super().__init__()
        inverse = 10_000.0 ** (-torch.arange(WIDTH, dtype=torch.float32) / WIDTH)
        self.register_buffer("inverse", inverse, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        table = (torch.arange(300.0)[:, None] * self.inverse).cos()
        h = self.encode(x)
        return self.head(h * table[-1].to(h.dtype)), table


def train(run: Run) -> None:
    for _ in run.steps(1):
        for part in run.parts():
            with run.precision():
                x = part["x"].to(torch.bfloat16) if run.engine.casts_inputs else part["x"]
                out, table = run.model(x)
            run.backward(F.mse_loss(out.float(), part["y"]))
            run.record("table", table)
        run.step(look=False)
    run.record("dtype of the buffer", str(run.module.inverse.dtype))


CASE = Case(
    users="train in bfloat16 a model that computes rotary positions in float32",
    classes=(34,),
    threads=("deepspeedai/DeepSpeed#4932", "huggingface/transformers#28596", "deepspeedai/DeepSpeed#5812"),
    model=Rotary,
    train=train,
    bf16=True,
    weights=False,
    remedies=(Remedy("torch_autocast instead of bf16", ZERO, {"autocast": True}),),
)
