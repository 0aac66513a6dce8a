"""The loss has a penalty on the weights: parameters are read outside any module's forward.

ZeRO-3 returns a placeholder: a size error, or silently a penalty of nothing. FSDP2 returns a DTensor, which does not
mix with ordinary tensors.
"""

from __future__ import annotations

from torch import Tensor

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.models import Net, Part, mse
from shardproof.casebook.run import Run


def loss(run: Run, part: Part) -> Tensor:
    parameters = list(run.module.parameters())
    data = mse(run, part)
    with run.gathered(parameters):
        return data + 1e-2 * sum(run.read(p).pow(2).sum() for p in parameters)


CASE = Case(
    users="add a penalty on the weights to the loss",
    classes=(11,),
    threads=("deepspeedai/DeepSpeed#930", "deepspeedai/DeepSpeed#7464", "deepspeedai/DeepSpeed#876"),
    model=Net,
    loss=loss,
    remedies=(
        Remedy("GatheredParameters around the penalty", ("deepspeed-3",), {"gather": True}),
        Remedy("full_tensor() of each parameter", ("fsdp2",), {"full_tensor": True}),
    ),
)
