"""Ranks on machines that cannot see the folder: rank 0 writes their parts, and reads for them.

A checkpoint or a model is in one place: rank 0's folder. If machines do not share a file system, bytes travel there and
back over the ranks' process group, piece by piece and rank by rank. The files are the same as on a shared file system.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SEEN_WITHIN = 5.0  # seconds until all machines see a file that one has created
WINDOW = 1 << 22  # bytes to collect before sending
END = -1


def blind(folder: Path, rank: int, everyone: Callable[[Any], list[Any]]) -> list[int]:
    """The ranks that cannot see `folder`, which rank 0 has created; the same list on all. Collective.

    Args:
        everyone: an all-gather of objects.
    """
    mark = folder / f".{secrets.token_hex(8)}"
    if rank == 0:
        with contextlib.suppress(OSError):
            mark.touch()
    mark = folder / everyone(mark.name)[0]
    limit = time.monotonic() + SEEN_WITHIN
    while not (seen := mark.exists()) and time.monotonic() < limit:
        time.sleep(0.1)
        for parent in (folder.parent, folder):  # makes a network file system look again
            with contextlib.suppress(OSError):
                os.listdir(parent)
    found = everyone(seen)
    if rank == 0:
        mark.unlink(missing_ok=True)
    return [other for other, sees in enumerate(found) if not sees] if found[0] else []


class Post:
    """Packets (three numbers, and bytes) between this rank and another one.

    Args:
        other: its rank in `group`.
    """

    def __init__(self, group: Any, other: int) -> None:
        self.group, self.other = group, other

    def send(self, number: int, at: int = 0, wanted: int = 0, data: Any = b"") -> None:
        header = torch.tensor([number, at, wanted, len(data)])
        dist.send(header, group=self.group, group_dst=self.other)
        if len(data):
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), group=self.group, group_dst=self.other)

    def end(self) -> None:
        self.send(END)

    def receive(self) -> tuple[int, int, int, memoryview]:
        header = torch.empty(4, dtype=torch.int64)
        dist.recv(header, group=self.group, group_src=self.other)
        number, at, wanted, size = header.tolist()
        data = torch.empty(size, dtype=torch.uint8)
        if size:
            dist.recv(data, group=self.group, group_src=self.other)
        return number, at, wanted, memoryview(data.numpy())  # type: ignore[arg-type]  # numpy does not say that it is one


class Sent(io.RawIOBase):
    """A file on another machine: everything written to it is sent there, in order."""

    def __init__(self, post: Post) -> None:
        self._post, self._at = post, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        self._post.send(0, self._at, data=data)
        self._at += len(data)
        return len(data)

    def tell(self) -> int:
        return self._at
