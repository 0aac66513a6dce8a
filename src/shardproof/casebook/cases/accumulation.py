"""Gradient accumulation over unequal micro-batches, with clipping: the same numbers at every stage.

Curves that differ by stage, bucket size or accumulation were reported repeatedly, and the threads closed for
inactivity.
"""

from __future__ import annotations

from shardproof.casebook.case import Case
from shardproof.casebook.models import Net, mse, sgd, two_parts
from shardproof.casebook.run import Run


def train(run: Run) -> None:
    for _ in run.steps(4):
        for number, part in enumerate(run.parts()):
            loss = mse(run, part) * (0.25 if number % 2 else 0.75)
            run.backward(loss)
            run.record("loss", loss)
        run.step()


CASE = Case(
    users="accumulate gradients over two micro-batches",
    classes=(31,),
    threads=("deepspeedai/DeepSpeed#966", "deepspeedai/DeepSpeed#6351", "Lightning-AI/pytorch-lightning#19246"),
    model=Net,
    train=train,
    batches=two_parts,
    optimizer=sgd,
    clip=0.3,
    accumulation=2,
)
