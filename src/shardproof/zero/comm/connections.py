"""Connections to other machines: which machine is at the other end, and how one that falls silent is noticed.

[Note: a machine that is cut off] A process that ends closes its connections, which wakes its peers at once. A machine
that loses power or network closes nothing: the kernel retransmits for a quarter of an hour, and an idle connection
stays open forever. So the kernel is told to probe the connections of our process groups, and to close those without an
acknowledgement for `silence()` seconds. Acknowledging is up to the kernel at the other end, however long its processes
compute, load or are stopped. Only gloo's connections are treated like this: gloo sends data only once the receiver has
a buffer for it, so none stays unacknowledged because a process is late. The same cannot be said of NCCL.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch.distributed as dist

from shardproof.errors import EngineError

Method = TypeVar("Method", bound=Callable[..., Any])

SILENCE = 6.0  # seconds; waiting ranks are told within ten
VARIABLE = "SHARDPROOF_SILENCE"  # for networks that are away for longer and come back: other seconds, 0 for no limit

LONGEST = 30000  # what the kernel takes
Sockets = set[tuple[int, str]]  # descriptor and what it is open for: numbers are used again


class NeighbourGone(RuntimeError):
    """The connection to a rank on this machine is closed."""

    def __init__(self, rank: int, why: object) -> None:
        super().__init__(f"Connection to rank {rank} closed: {why}")
        self.rank = rank


def silence() -> float:
    """Seconds of silence after which a connection is closed, as the variable says; 0 where none is.

    Raises:
        EngineError: it is no number, or less than 0.
    """
    text = os.environ.get(VARIABLE) or str(SILENCE)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= LONGEST:
        raise EngineError(f"{VARIABLE}={text}: takes seconds from 0 (no limit) to {LONGEST}.")
    return seconds


@contextmanager
def tcp_keepalive() -> Iterator[None]:
    """The connections to other machines that are opened inside are closed when these fall silent. Linux only."""
    seconds, before = silence(), _sockets()
    yield
    _set_keepalive(_sockets() - before, seconds)


def tcp_keepalive_everywhere() -> None:
    """The same for all that this process has: of one that has no others than such."""
    _set_keepalive(_sockets(), silence())


def addresses() -> list[str]:
    """Those by which other machines know this one: its end of every connection that there is to them."""
    found = set()
    for descriptor, _ in _sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if (ends := _ends(connection)) is not None:
                found.add(ends[0])
    return sorted(found)


def fell_silent(problem: str) -> bool:
    """Whether it was the kernel that closed a connection, by what gloo says of it."""
    return any(sign in problem for sign in ("timed out", "No route to host", "unreachable"))


def is_closed_connection(error: BaseException) -> bool:
    """Whether an operation has failed because a connection of gloo's or of a store was closed."""
    return isinstance(error, dist.DistError | NeighbourGone) or (
        isinstance(error, RuntimeError) and ("gloo" in str(error) or "pair closure" in str(error))
    )


def names_lost_ranks(method: Method) -> Method:
    """Of collectives: their waits say who is gone, by `self.lost`, when a closed connection ends them."""

    @functools.wraps(method)
    def waits(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except RuntimeError as problem:
            if self.lost is None or not is_closed_connection(problem):
                raise
            raise self.lost(problem) from None

    return cast("Method", waits)


def address_in(problem: str) -> str:
    """The address at the other end, by what gloo says, or nothing."""
    found = re.search(r"\[([0-9a-fA-F.:]+)\]:\d+", problem)
    return _plain(found[1]) if found else ""


def _ends(connection: socket.socket) -> tuple[str, str] | None:
    """The addresses of a connection to another machine."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return None
    here, there = _plain(connection.getsockname()[0]), _plain(connection.getpeername()[0])
    return None if here == there else (here, there)


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:")


def _sockets() -> Sockets:
    found: Sockets = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{descriptor}")
                if target.startswith("socket:"):
                    found.add((int(descriptor), target))
    return found


def _set_keepalive(sockets: Sockets, seconds: float) -> None:
    for descriptor, _ in sockets if seconds else ():
        # Some listen, or are gone already.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if _ends(connection) is None:
                continue
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1)):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(round(1000 * seconds), 1))
