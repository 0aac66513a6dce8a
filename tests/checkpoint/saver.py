"""A job that saves one checkpoint after the other, until somebody ends it. `python saver.py FOLDER [LIMIT]`

With a limit, files cannot grow beyond so many bytes: a disk that is full as soon as a file is that long.
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn

import shardproof
from checkpoint.runs import Job


def main(folder: str, limit: int = 0) -> None:
    build = lambda: nn.Sequential(*(nn.Linear(300, 300) for _ in range(6)))  # noqa: E731
    job = Job(3, build, lambda params: torch.optim.AdamW(params, lr=1e-3))
    model, optimizer = job.model, job.optimizer
    for step in itertools.count(1):
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if limit and step == 2:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            shardproof.save(model, optimizer, f"{folder}/step-{step}", step=step).wait()
        except shardproof.CheckpointError as error:
            print(error)
            break
        if job.rank == 0:
            print(step, flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
    os._exit(0)
