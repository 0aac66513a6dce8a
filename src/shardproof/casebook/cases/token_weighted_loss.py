"""Ranks and micro-batches have unequal numbers of answer tokens, and the loss is the mean over all tokens.

A mean of means is another loss: 138 against 6.4, or a curve that depends on the number of GPUs. The sum over answer
tokens is divided by their number in the step on all ranks, and multiplied by the number of ranks that the engine
averages over.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from shardproof.casebook.case import Case
from shardproof.casebook.models import CLASSES, Net, Part, draw, sgd, two_parts
from shardproof.casebook.run import Run


def batches(step: int, rank: int) -> list[Part]:
    found = []
    for number, part in enumerate(two_parts(step, rank)):
        g = draw(step, rank, 10 + number)
        answers = torch.arange(4) <= (step + rank + 2 * number) % 4
        found.append({"x": part["x"], "labels": torch.randint(0, CLASSES, (4,), generator=g).where(answers, -100)})
    return found


def train(run: Run) -> None:
    for _ in run.steps(3):
        tokens = run.everywhere(lambda part: int((part["labels"] != -100).sum()))
        for part in run.parts():
            total = F.cross_entropy(run.model(part["x"]), part["labels"], reduction="sum")
            loss = total * run.world / tokens
            run.backward(loss)
            run.record("loss", loss)
        run.step()


CASE = Case(
    users="average the loss over all answer tokens of a step",
    classes=(35,),
    threads=("huggingface/transformers#34263", "hiyouga/LlamaFactory#7443", "huggingface/trl#2604"),
    model=Net,
    train=train,
    batches=batches,
    optimizer=sgd,
    accumulation=2,
)
