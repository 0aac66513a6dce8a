"""Evaluation during training: ranks have unequal numbers of evaluation batches, some none.

A hang at the end of the evaluation, or "disagreement between rank0 and rank6"; public answers are "disable eval" and
"not supported".
"""

from __future__ import annotations

from typing import Any

import torch

from shardproof.casebook.case import Case
from shardproof.casebook.models import Net, mse, numbers
from shardproof.casebook.run import Run


def batches(step: int, rank: int) -> list[Any]:
    (part,) = numbers(step, rank)
    return [{**part, "evaluation": [p for i in range((rank + step) % 3) for p in numbers(step, 60 + 10 * rank + i)]}]


def train(run: Run) -> None:
    for _ in run.steps(3):
        for part in run.parts():
            loss = mse(run, part)
            run.backward(loss)
            run.record("loss", loss)
            run.model.eval()
            with torch.no_grad():
                run.record("evaluation", sum((mse(run, p) for p in part["evaluation"]), torch.zeros(())))
            run.model.train()
        run.step()


CASE = Case(
    users="evaluate during training on unequal numbers of batches",
    classes=(43,),
    threads=("hiyouga/LlamaFactory#4428", "hiyouga/LlamaFactory#5292", "huggingface/transformers#20130"),
    model=Net,
    train=train,
    batches=batches,
    diverges=True,
)
