"""An omni model has a talker that text training never calls, and that the loader has put somewhere else.

In the thread the talker stays on the CPU while the rest is on the GPU, and ZeRO-3 stops with "two devices, cuda:0 and
cpu". This machine may have a single device, so "elsewhere" is a stand-in here: the talker's weights are mapped from a
file instead of being in memory, in a different dtype from the thinker's, and its buffer in a third. Expected: the
thinker trains, the talker keeps every bit, its dtypes and its buffer.
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor

from shardproof.casebook.case import Case
from shardproof.casebook.models import Net, plain
from shardproof.casebook.run import Run


class Omni(Net):
    def __init__(self) -> None:
        super().__init__()
        talker = Net(depth=2).to(torch.bfloat16).requires_grad_(False)
        talker.register_buffer("mel", torch.linspace(0, 1, 5, dtype=torch.float64))
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            torch.save(talker.state_dict(), file.name)
            talker.load_state_dict(torch.load(file.name, mmap=True), assign=True)
        self.talker = talker

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


def train(run: Run) -> None:
    plain(run)
    run.record("dtype of the talker", str(run.module.talker.head.weight.dtype))
    run.record("buffer of the talker", run.module.talker.mel)


CASE = Case(
    users="train the thinker of an omni model whose talker is never called and was loaded elsewhere",
    classes=(27,),
    threads=("modelscope/ms-swift#3824", "hiyouga/LlamaFactory#7537"),
    model=Omni,
    train=train,
)
