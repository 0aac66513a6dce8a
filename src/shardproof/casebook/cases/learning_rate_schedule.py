"""A schedule of warm-up and decay, stepped once for each optimizer step.

A schedule that is stepped once for each process ends after a fraction of the training.
"""

from __future__ import annotations

import torch

from shardproof.casebook.case import Case
from shardproof.casebook.models import Net, mse, sgd
from shardproof.casebook.run import Run


def train(run: Run) -> None:
    schedule = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, max_lr=0.05, total_steps=8)
    for _ in run.steps(6):
        for part in run.parts():
            loss = mse(run, part)
            run.backward(loss)
            run.record("loss", loss)
        run.record("learning rate", float(run.optimizer.param_groups[0]["lr"]))
        run.step()
        schedule.step()


CASE = Case(
    users="step a learning-rate schedule after each optimizer step",
    classes=(36,),
    threads=("huggingface/accelerate#2926", "huggingface/accelerate#2142", "huggingface/diffusers#3954"),
    model=Net,
    train=train,
    optimizer=sgd,
)
