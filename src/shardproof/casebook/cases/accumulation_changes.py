"""The number of micro-batches per step changes during training.

If micro batch, accumulation and world size are in one configuration and must multiply to a fourth number, this is
impossible: "train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size".
"""

from __future__ import annotations

from torch import Tensor

from shardproof.casebook.case import ZERO, Case, Remedy
from shardproof.casebook.models import Net, Part, mse, numbers
from shardproof.casebook.run import Run


def batches(step: int, rank: int) -> list[Part]:
    """One micro-batch, then two, then three."""
    return [part for number in range(step + 1) for part in numbers(step, rank + 10 * number)]


def train(run: Run) -> None:
    for step in run.steps(3):
        if "set_batch_size" in run.options:
            run.model.set_train_batch_size((step + 1) * run.world)
        for number, part in enumerate(run.parts()):
            if "boundary" in run.options:
                run.model.set_gradient_accumulation_boundary(number == step)
            loss: Tensor = mse(run, part) / (step + 1)
            run.backward(loss)
            run.record("loss", loss)
        run.step()


CASE = Case(
    users="change the number of accumulation steps during training",
    classes=(23,),
    threads=("deepspeedai/DeepSpeed#4703", "deepspeedai/DeepSpeed#3228", "huggingface/accelerate#1324"),
    model=Net,
    train=train,
    batches=batches,
    remedies=(
        Remedy("set_gradient_accumulation_boundary() before each backward", ZERO, {"boundary": True}),
        Remedy(
            "set_train_batch_size() before each step",
            ZERO,
            {"set_batch_size": True},
        ),
    ),
)
