"""One rank raises; the other waits for it."""

import torch.distributed as dist

from shardproof.casebook.case import Case
from shardproof.casebook.models import Net


def train(run):
    if dist.is_initialized():
        if run.engine.rank == 1:
            raise ValueError("\nthe first line\nthe second")
        dist.barrier()


CASE = Case(users="raise", classes=(1,), threads=("owner/name#2",), model=Net, train=train)
