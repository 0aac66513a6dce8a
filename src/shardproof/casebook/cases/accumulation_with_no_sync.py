"""Accumulation with `no_sync` around all micro-batches but the last, as Accelerate does for every engine.

"no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage 2".
"""

from __future__ import annotations

import contextlib

from shardproof.casebook.case import ZERO, Case, Remedy
from shardproof.casebook.models import Net, mse, two_parts
from shardproof.casebook.run import Run


def train(run: Run) -> None:
    for _ in run.steps(3):
        for number, part in enumerate(run.parts()):
            with contextlib.nullcontext() if number % 2 else run.no_sync():
                loss = mse(run, part) / 2
                run.backward(loss)
            run.record("loss", loss)
        run.step()


CASE = Case(
    users="hold reduction back with no_sync while gradients accumulate",
    classes=(56,),
    threads=("deepspeedai/DeepSpeed#6793", "huggingface/accelerate#3481", "hiyouga/LlamaFactory#6194"),
    model=Net,
    train=train,
    batches=two_parts,
    accumulation=2,
    remedies=(Remedy("without no_sync", ZERO, {"without_no_sync": True}),),
)
