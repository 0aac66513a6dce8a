"""A policy and a critic are trained side by side, against a frozen teacher.

Engines with process-global state take one model only: "You can't use same Accelerator() instance with multiple
models", or the last one silently wins.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from shardproof.casebook.case import Case
from shardproof.casebook.models import Net
from shardproof.casebook.run import Run


def model() -> dict[str, nn.Module]:
    return {"policy": Net(), "critic": Net(depth=2), "teacher": Net(depth=1).requires_grad_(False)}


def train(run: Run) -> None:
    policy, critic, teacher = run.models.values()
    for _ in run.steps(3):
        for part in run.parts():
            with torch.no_grad():
                target = teacher(part["x"])
            out = policy(part["x"])
            value = critic(part["x"])
            loss = F.mse_loss(out, target) + (out * value.detach()).mean()
            run.backward(loss, model="policy")
            run.backward(F.mse_loss(value, part["y"]), model="critic")
            run.record("loss", loss)
        run.step()


CASE = Case(
    users="train a policy and a critic, with a frozen teacher, in one process",
    classes=(45,),
    threads=("huggingface/accelerate#253", "huggingface/accelerate#2496"),
    model=model,
    train=train,
)
