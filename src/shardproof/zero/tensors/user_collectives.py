"""Collectives that a user calls on sharded tensors: `dist.all_reduce(p.grad)`.

A collective writes to memory without raising a version counter, so its effect on a copy would go unnoticed. Here it
gets copies and is waited for, and each rank writes its slice of the results back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardproof.errors import EngineError
from shardproof.zero.tensors.parameter import ShardedTensor

MODULE = "torch.distributed.distributed_c10d"
_SENDS = ("send", "isend", "gather")  # elsewhere what comes first is written
_ON_ONE_RANK = ("recv", "irecv")


def collective(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func` of torch.distributed on whole tensors, and take its results.

    Raises:
        EngineError: it would give a parameter another value on one rank alone.
    """
    results: list[tuple[ShardedTensor, torch.Tensor]] = []

    def copied(x: ShardedTensor) -> torch.Tensor:
        results.append((x, x.whole().detach().clone()))
        return results[-1][1]

    name, first = func.__name__, args[0]
    with torch.no_grad():
        if name not in _SENDS:
            first = torch.utils._pytree.tree_map_only(ShardedTensor, copied, first)
        if name in _ON_ONE_RANK and results:
            raise EngineError(
                f"torch.distributed.{name} would give '{results[0][0].qualified_name}' another value on this rank "
                "alone. Receive into a tensor of your own, and let all ranks write the same."
            )
        given = (first, *args[1:]), kwargs
        plain, named = torch.utils._pytree.tree_map_only(ShardedTensor, lambda x: x.whole(), given)
        work = func(*plain, **named)
        if work is not None and results:
            work.wait()
        for target, value in results:
            target.write(value)
    return work
