"""A part of the model is never used; weight decay must not touch it either.

DDP waits for the gradient that never comes: "Expected to have finished reduction in the prior iteration". Engines
that take a missing gradient for zeros let weight decay shrink the unused weights.
"""

from __future__ import annotations

from torch import nn

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.models import WIDTH, Block, Net


def model() -> nn.Module:
    net = Net()
    net.spare, net.blocks[1].spare = nn.Linear(WIDTH, WIDTH), Block()
    return net


CASE = Case(
    users="train a model with parts that no batch uses",
    classes=(3,),
    threads=("huggingface/accelerate#2017", "modelscope/ms-swift#587", "huggingface/transformers#30633"),
    model=model,
    remedies=(Remedy("find_unused_parameters=True", ("ddp",), {"find_unused_parameters": True}),),
)
