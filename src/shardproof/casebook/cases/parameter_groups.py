"""Learning rates by module: one for the tower, one for the head, neither for the rest.

Engines that flatten all parameters into one group give one rate to all; a head that is not among the listed names is
never updated.
"""

from __future__ import annotations

import torch
from torch import nn

from shardproof.casebook.case import Case
from shardproof.casebook.models import Net


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    def named(*starts: str) -> list[nn.Parameter]:
        return [p for name, p in model.named_parameters() if name.removeprefix("module.").startswith(starts)]

    return torch.optim.AdamW(
        [
            {"params": named("embed", "norm"), "lr": 1e-3},
            {"params": named("blocks"), "lr": 1e-2, "weight_decay": 0.1},
            {"params": named("head"), "lr": 5e-2, "weight_decay": 0.0},
        ],
        eps=1e-4,
    )


CASE = Case(
    users="give parts of the model learning rates and weight decays of their own",
    classes=(37,),
    threads=("deepspeedai/DeepSpeed#6873", "modelscope/ms-swift#2723"),
    model=Net,
    optimizer=optimizer,
)
