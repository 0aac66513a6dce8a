"""An average of the weights is kept by hand, and loaded back in the middle of training.

Under ZeRO-3 an edit of a gathered weight is lost without modifier_rank, silently, and the average reads back empty
tensors; ZeRO-1 and 2 step from a copy of the weights that does not see the edit.
"""

from __future__ import annotations

import torch

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.models import Net, mse
from shardproof.casebook.run import Run


def train(run: Run) -> None:
    parameters = list(run.module.parameters())
    with torch.no_grad(), run.gathered(parameters):
        average = [p.detach().clone() for p in parameters]
    for step in run.steps(4):
        for part in run.parts():
            loss = mse(run, part)
            run.backward(loss)
            run.record("loss", loss)
        run.step()
        with torch.no_grad(), run.gathered(parameters, edit=step == 1):
            for mean, p in zip(average, parameters, strict=True):
                mean.lerp_(p, 0.5)
                if step == 1:
                    p.copy_(mean)


CASE = Case(
    users="keep an exponential average of the weights, and put it back",
    classes=(39,),
    threads=("deepspeedai/DeepSpeed#7811", "OpenRLHF/OpenRLHF#1357"),
    model=Net,
    train=train,
    remedies=(
        Remedy("GatheredParameters(modifier_rank=0), then refresh_fp32_params()", ("deepspeed-3",), {"gather": True}),
        Remedy("refresh_fp32_params()", ("deepspeed-1", "deepspeed-2"), {"gather": True}),
    ),
)
