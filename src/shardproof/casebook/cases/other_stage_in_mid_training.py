"""Training continues at another stage: full weights are taken out of one engine and loaded into the next.

Checkpoints that are keyed by rank fit one number of ranks and one stage. This case covers the weights; the optimizer
state starts afresh, in the single process too.
"""

from __future__ import annotations

import torch

from shardproof.casebook.case import Case
from shardproof.casebook.models import Net, plain
from shardproof.casebook.run import Key, Run


def train(run: Run) -> None:
    plain(run)
    weights = run.state()
    run.found = {Key(f"first run, {key.what}", *key[1:]): value for key, value in run.found.items()}
    torch.manual_seed(5)
    run.engine.next_stage()
    run.prepare({"": Net()})
    run.load(weights)
    plain(run)


CASE = Case(
    users="continue from whole weights at another stage",
    classes=(50,),
    threads=("deepspeedai/DeepSpeed#2898", "deepspeedai/DeepSpeed#3810", "Lightning-AI/pytorch-lightning#19585"),
    model=Net,
    train=train,
)
