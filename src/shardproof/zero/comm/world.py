"""The process group of all ranks, as we start it, and how long it may take."""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardproof.zero.comm.connections import tcp_keepalive
from shardproof.zero.comm.store import AGENT_STORE, store_of_attempt
from shardproof.zero.device import default_device

# How long an operation may take in a process group of ours. A rank that computes, loads or saves for an hour is in
# order, and ranks that wait for each other for good are found by the watchdog: torch's 10 or 30 minutes would end both.
# There is a limit at all for an accelerator that waits for a machine which is gone: nothing else wakes it.
LONGEST = timedelta(hours=6)


def start_group(**options: Any) -> None:
    """Make the process group that the environment describes (torchrun's variables), on the device of this rank.

    Args:
        options: those of `torch.distributed.init_process_group`.
    """
    device = default_device()
    with tcp_keepalive() if device.type == "cpu" else nullcontext():
        if os.environ.get(AGENT_STORE) == "True":
            limit = options.get("timeout") or dist.default_pg_timeout
            options |= dict(zip(("store", "rank", "world_size"), store_of_attempt(limit), strict=True))
        dist.init_process_group(**options)
    if "timeout" not in options:  # there, it would also say how long ranks wait for one that never starts
        may_take_long(dist.group.WORLD)


def is_first() -> bool:
    """Whether this is the first rank, or there are no others."""
    return not dist.is_initialized() or dist.get_rank() == 0


def may_take_long(*groups: dist.ProcessGroup | None) -> None:
    """What these groups, which are ours, do may take `LONGEST`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of backends that have no limit, or none that can be set
        for group in groups:
            dist.distributed_c10d._set_pg_timeout(LONGEST, group)
