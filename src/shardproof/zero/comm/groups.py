"""Process groups of our own beside those of the user, made once for each of them.

[Note: names of groups] Ranks find each other under the name of their group, which torch derives from the number of
groups each rank has made. If some ranks have made further groups among themselves, these numbers differ (up to torch
2.13 for groups that only their members make, from 2.15 on for all), and the ranks wait for each other under different
names forever. So the ranks of a group of ours agree on a number, and torch counts from there while the group is made.
The name of a group that only its members make is a hash of its ranks and the number of existing groups, whatever the
count says: we make it from the ranks and the agreed number. Afterwards torch's own count is restored: a group that all
ranks of a user make later must not depend on which of them had one of ours.
"""

from __future__ import annotations

import contextlib
import socket
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from shardproof.zero.comm.connections import addresses, tcp_keepalive
from shardproof.zero.comm.world import may_take_long
from shardproof.zero.device import imagined

group_named = torch._C._distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
_torchs: Any = dist.distributed_c10d
_world = _torchs._world
T = TypeVar("T")
FIRST = 1 << 40  # number of our first group: no job makes as many of its own
_next = FIRST
Made = tuple["weakref.ref[Any] | None", T]  # what belongs to a process group, and the group


def once(group: Any, known: dict[str, Made[T]], make: Callable[[], T]) -> T:
    """`known` holds what was made by name of a group, with the group itself: when it has ended, another one may get
    its name, and its address too."""
    name = str(group.group_name) if group is not None else ""
    if name in known:
        before, found = known[name]
        if (before and before()) is group:
            return found
    found = make()
    known[name] = weakref.ref(group) if group is not None else None, found
    return found


def new_gloo_group(group: dist.ProcessGroup | None) -> str:
    """The name of a new gloo group of the same ranks, which only these make."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    part, backend = len(ranks) != dist.get_world_size(), "fake" if imagined(group) else "gloo"
    with tcp_keepalive(), _counted_apart(group):
        made = dist.new_group(ranks, backend=backend, use_local_synchronization=part)
    may_take_long(made)
    return str(made.group_name)


@contextlib.contextmanager
def _counted_apart(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Groups are numbered from a number that all ranks of `group` agree on. See [Note: names of groups]."""
    global _next
    theirs, hashed = _world.group_count, getattr(_torchs, "_hash_ranks_to_str", None)
    agreed = _next if imagined(group) else max(all_gather_object(group, _next))
    _world.group_count, _torchs._hash_ranks_to_str = agreed, lambda ranks: "_".join(map(str, [agreed, *ranks]))
    try:
        yield
    finally:
        _next = max(_next, _world.group_count) + 1
        _world.group_count, _torchs._hash_ranks_to_str = theirs, hashed


def all_gather_object(group: dist.ProcessGroup | None, what: Any) -> list[Any]:
    """What each rank has told, in their order."""
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, what, group=group)
    return told


class Host(NamedTuple):
    """The machine of a rank: its name, and the addresses by which the others know it."""

    name: str
    addresses: list[str]


def hosts_of(group: dist.ProcessGroup) -> list[Host]:
    """The machine of each of its ranks."""
    return all_gather_object(group, Host(socket.gethostname(), addresses()))
