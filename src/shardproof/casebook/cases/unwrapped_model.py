"""Code runs the user's own model instead of the wrapper: another method, a sub-module, a reward head.

"'weight' must be 2-D": the hooks that gather weights are on the wrapper's forward, and do not run in this case.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.models import Net
from shardproof.casebook.run import Run


def train(run: Run) -> None:
    for _ in run.steps(3):
        for part in run.parts():
            with torch.no_grad():
                hidden = run.module.encode(part["x"])
                reward = run.module.head(run.module.blocks[1](hidden)).mean()
            loss = F.mse_loss(run.model(part["x"]), part["y"]) * (1 + reward.square())
            run.backward(loss)
            run.record("reward", reward)
            run.record("loss", loss)
        run.step()


CASE = Case(
    users="call another method or a sub-module of the unwrapped model, for a reward",
    classes=(18,),
    threads=("huggingface/trl#669", "hiyouga/LlamaFactory#3108", "pytorch/pytorch#111958"),
    model=Net,
    train=train,
    remedies=(Remedy("register_fsdp_forward_method(model, 'encode')", ("fsdp2",), {"forward_methods": ("encode",)}),),
)
