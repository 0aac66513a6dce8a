"""The data does not divide by the number of ranks: in the last steps some ranks have no batch.

A hang at the end of the epoch. Every rank still calls `step()`; a rank without a batch must contribute nothing.
"""

from __future__ import annotations

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.models import Net, Part, mse, numbers
from shardproof.casebook.run import Run


def batches(step: int, rank: int) -> list[Part]:
    """Rank 0 has one batch more than the others."""
    return numbers(step, rank) if step < 2 or rank == 0 else []


def train(run: Run) -> None:
    with run.join():
        for _ in run.steps(3):
            for part in run.parts():
                loss = mse(run, part)
                run.backward(loss)
                run.record("loss", loss)
            run.step(look=False)


CASE = Case(
    users="train on data that does not divide by the number of ranks",
    classes=(58,),
    threads=("pytorch/pytorch#141069", "Lightning-AI/pytorch-lightning#20404", "huggingface/datasets#6623"),
    model=Net,
    train=train,
    batches=batches,
    diverges=True,
    remedies=(Remedy("Join([model])", ("ddp",), {"join": True}),),
)
