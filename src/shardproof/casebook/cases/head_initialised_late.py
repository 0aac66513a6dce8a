"""A new head is initialised after the model was handed to the engine.

Under ZeRO-3 the initialisation runs on empty tensors and does nothing, silently; ZeRO-1 and 2 keep a copy of the
weights that does not see it, and restore the old values at the first step.
"""

from __future__ import annotations

import torch
from torch import nn

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.models import Net, plain
from shardproof.casebook.run import Run


def train(run: Run) -> None:
    head = run.module.head
    with torch.no_grad(), run.gathered([head.weight, head.bias], edit=True):
        nn.init.constant_(head.weight, 0.05)
        nn.init.zeros_(head.bias)
    plain(run)


CASE = Case(
    users="initialise a new head after the model was handed to the engine",
    classes=(20,),
    threads=("huggingface/transformers#28244", "OpenRLHF/OpenRLHF#348"),
    model=Net,
    train=train,
    remedies=(
        Remedy("GatheredParameters(modifier_rank=0), then refresh_fp32_params()", ("deepspeed-3",), {"gather": True}),
        Remedy("refresh_fp32_params()", ("deepspeed-1", "deepspeed-2"), {"gather": True}),
    ),
)
