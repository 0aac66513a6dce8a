"""A fused or chunked loss takes `lm_head.weight` by attribute, and never calls the head.

Liger's kernels do this. Under ZeRO-3 the weight is empty there: "size mismatch", a ZeroDivisionError in Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.models import Net, Part
from shardproof.casebook.run import Run


class Headless(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def loss(run: Run, part: Part) -> Tensor:
    hidden = run.model(part["x"])
    head = run.module.head
    total = torch.zeros(())
    with run.gathered([head.weight, head.bias]):
        weight, bias = run.read(head.weight), run.read(head.bias)
        for h, y in zip(hidden.split(2), part["y"].split(2), strict=True):
            total = total + F.mse_loss(F.linear(h, weight, bias), y) / 2
    return total


CASE = Case(
    users="use a fused loss that reads the head's weight",
    classes=(12,),
    threads=("huggingface/trl#3368", "linkedin/Liger-Kernel#767"),
    model=Headless,
    loss=loss,
    remedies=(
        Remedy("GatheredParameters around the loss", ("deepspeed-3",), {"gather": True}),
        Remedy("full_tensor() of the head", ("fsdp2",), {"full_tensor": True}),
        Remedy("find_unused_parameters=True", ("ddp",), {"find_unused_parameters": True}),
    ),
)
