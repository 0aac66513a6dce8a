"""DPO computes the reference's values for the whole data set before the first training step.

In most trainers the engine is not set up by then: "'weight' must be 2-D" with ZeRO-3, tensors on two devices with
ZeRO-2. Here the model itself is used as soon as it was handed over, in eval mode.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from shardproof.casebook.case import Case
from shardproof.casebook.models import Net
from shardproof.casebook.run import Run

STEPS = 3


def train(run: Run) -> None:
    run.module.eval()
    with torch.no_grad():
        reference = [[run.module(part["x"]) for part in run.parts()] for _ in run.steps(STEPS)]
    run.module.train()
    for step in run.steps(STEPS):
        for number, part in enumerate(run.parts()):
            margin = (run.model(part["x"]) - reference[step][number]) @ part["y"].t()
            loss = -F.logsigmoid(0.1 * margin).mean()
            run.backward(loss)
            run.record("loss", loss)
        run.step()


CASE = Case(
    users="compute reference values with the unwrapped model before training begins",
    classes=(44,),
    threads=("huggingface/trl#2985", "huggingface/trl#6403"),
    model=Net,
    train=train,
)
