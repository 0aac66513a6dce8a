"""RLHF keeps the policy in eval mode: rollouts under inference_mode, old values under no_grad, then the loss.

The policy has dropout, which must stay off. ZeRO-3 chose its coordinator by `module.training` and refused:
"backward pass is invalid for module in evaluation mode"; buffers first gathered under inference_mode cannot be
saved for backward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.models import Net
from shardproof.casebook.run import Run


class Policy(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.encode(x), 0.5, self.training))


def train(run: Run) -> None:
    aside = torch.no_grad if "no_grad" in run.options else torch.inference_mode
    run.model.eval()
    for _ in run.steps(3):
        for part in run.parts():
            with aside():
                rollout = run.model(part["x"]).clone()
            with torch.no_grad():
                old = run.model(part["x"])
            new = run.model(part["x"])
            loss = F.mse_loss(new, part["y"]) + (new - old).square().mean()
            with aside():
                run.model(part["x"] * 2)  # another rollout before backward
            run.backward(loss)
            run.record("rollout", rollout)
            run.record("loss", loss)
        run.step()


CASE = Case(
    users="train a policy in eval mode, between rollouts under inference_mode",
    classes=(14,),
    threads=("modelscope/ms-swift#3107", "Lightning-AI/pytorch-lightning#19467", "OpenRLHF/OpenRLHF#118"),
    model=Policy,
    train=train,
    remedies=(Remedy("no_grad instead of inference_mode", ("fsdp2", "deepspeed-3"), {"no_grad": True}),),
)
