"""One rank enters a collective that the other never does, with a child process running."""

import os
import subprocess
from pathlib import Path

import torch.distributed as dist

from shardproof.casebook.case import Case
from shardproof.casebook.models import Net


def train(run):
    if dist.is_initialized() and run.engine.rank == 0:
        child = subprocess.Popen(["sleep", "600"])
        Path(os.environ["CHILD"]).write_text(str(child.pid))
        dist.barrier()
        dist.barrier()


CASE = Case(users="hang", classes=(4,), threads=("owner/name#1",), model=Net, train=train)
