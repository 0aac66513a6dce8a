"""A run that recovers by itself when processes die.

With --max-restarts torch's elastic agent restarts all ranks, in the same number. With --min-processes those that died
are considered lost (a broken GPU): a group of the others continues, under a new agent. The rows of a step stay the
same; accumulation adapts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardproof.cli.main import FAILURE
from shardproof.cli.processes.launch import Ended, run_group, stop_signals

if TYPE_CHECKING:
    from shardproof.train.run import Prepared


def launch_run(work: Callable[..., int | None], prepared: Prepared, nproc: int) -> int:
    """Run `work(prepared, signals)` on `nproc` ranks, until restarts are used up; returns the exit code."""
    from shardproof.train.run import again

    config: Any = prepared.config
    limit, fewest = config.max_restarts, config.min_processes
    signals = stop_signals(nproc, limit)
    if fewest is None:
        return run_group(work, (prepared, signals), nproc, config.debug, limit).code
    for number in range(limit + 1):
        ended = run_group(work, (prepared, signals), nproc, config.debug, apart=True)
        left = _next(prepared, nproc - ended.lost, fewest)
        if ended.code != FAILURE or number == limit:
            return ended.code
        if left is None:
            ranks = nproc - ended.lost
            why = f"only {ranks} left" if ranks < fewest else f"no number of processes from {fewest} to {ranks} fits"
            print(f"no restart: {why}", file=sys.stderr, flush=True)
            return ended.code
        print(f"restart {number + 1} of {limit}, on {left} process(es)", file=sys.stderr, flush=True)
        nproc = left
        prepared = again(prepared, nproc)
    return Ended(FAILURE).code


def _next(prepared: Prepared, left: int, fewest: int) -> int | None:
    """The largest number of the remaining processes over which a step's rows and copies of the model can be divided."""
    copy, batch = prepared.config.shard_group or 1, prepared.batch
    return next((n for n in range(left, fewest - 1, -1) if n % copy == 0 and batch.fits(n)), None)
