"""Full weights are loaded into a model that was handed to the engine.

Load paths that an engine hooks into change with every release around it: whole towers missing, "Cannot copy out of
meta tensor". For each engine its own documented way of loading full weights is used.
"""

from __future__ import annotations

import torch

from shardproof.casebook.case import Case
from shardproof.casebook.models import Net, plain
from shardproof.casebook.run import Run


def train(run: Run) -> None:
    torch.manual_seed(11)
    run.load(Net().state_dict())
    plain(run)


CASE = Case(
    users="load a checkpoint of whole weights after the model was handed to the engine",
    classes=(21,),
    threads=("huggingface/transformers#45397", "modelscope/ms-swift#9345", "axolotl-ai-cloud/axolotl#1249"),
    model=Net,
    train=train,
)
