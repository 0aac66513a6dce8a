"""deepspeed.comm: torch.distributed under another name, and the creation of the process group."""

from __future__ import annotations

import atexit
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardproof.zero.device import default_device


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Create the default process group, if there is none: with the ranks started by torchrun, or by another launcher
    that sets RANK and its companions; otherwise with this process alone."""
    if dist.is_initialized() or dist_init_required is False:
        return
    backend = dist_backend or dist.get_default_backend_for_device(default_device())
    try:
        dist.init_process_group(backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size)
    except ValueError as error:
        if "variable RANK expected" not in str(error):
            raise
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    atexit.register(_end)


def _end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def __getattr__(name: str) -> Any:
    """get_rank, get_world_size, barrier, all_reduce ... are torch.distributed's."""
    if name == "get_local_rank":
        return lambda: dist.get_node_local_rank(fallback_rank=0)
    try:
        return getattr(dist, name)
    except AttributeError:
        raise AttributeError(f"deepspeed.comm has no {name!r} here, nor does torch.distributed") from None
