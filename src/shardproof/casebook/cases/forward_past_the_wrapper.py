"""The training forward goes through parts of the unwrapped model, because the trainer wants the hidden states.

DDP arms its hooks in the wrapper's forward: without it gradients stay local, and the replicas drift apart silently.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.models import Net, Part
from shardproof.casebook.run import Run


def loss(run: Run, part: Part) -> Tensor:
    hidden = run.module.encode(part["x"])
    return F.mse_loss(run.module.head(hidden), part["y"])


CASE = Case(
    users="run the training forward through a sub-module of the unwrapped model",
    classes=(40,),
    threads=("huggingface/trl#3260",),
    model=Net,
    loss=loss,
    remedies=(Remedy("register_fsdp_forward_method(model, 'encode')", ("fsdp2",), {"forward_methods": ("encode",)}),),
)
