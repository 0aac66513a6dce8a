"""Words: numbers by which ranks tell each other what they want. See ranks/consensus.py."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import profiler

# Of messages that belong to no operation: `consensus.tag_of` gives smaller tags.
WORD_TAG, TREE_TAG, EXCHANGE_TAG, PROBE_TAG, NEVER_TAG = range(1 << 30, (1 << 30) + 5)
NO_WORD = -1
_record: Callable[[bool], None] = torch._C._autograd._enable_record_function  # type: ignore[attr-defined]


class Words:
    """Those that one rank sends to all others and hears from them. Nobody waits for who sends one.

    Args:
        group: gives the process group, which is not kept here. It must take messages from the CPU.
    """

    def __init__(self, group: Callable[[], Any], rank: int, size: int) -> None:
        self._group = group
        self._others = [r for r in range(size) if r != rank]
        # a queue exists once something is awaited: empty ones of thousands of ranks take megabytes
        self._awaited: defaultdict[int, deque[tuple[torch.Tensor, Any]]] = defaultdict(deque)
        self._sent: deque[tuple[torch.Tensor, list[Any]]] = deque()

    def send(self, word: int) -> None:
        """Send a number that is not negative to every other rank, without waiting.

        One is awaited from each of them at the same time: gloo sends only what the receiver has asked for.
        """
        message, group = torch.tensor([word], device="cpu"), self._group()
        for r in self._others:
            self._await(r)
        self._sent.append((message, [_unrecorded(group.send, [message], r, WORD_TAG) for r in self._others]))
        if len(self._sent) > 64:  # by now the oldest has long arrived: let go of it
            for work in self._sent.popleft()[1]:
                work.wait()

    def forget(self) -> None:
        """Let go of what was sent: nothing of it must be left when the process group ends."""
        while self._sent:
            for work in self._sent.popleft()[1]:
                work.wait()

    def is_here(self, rank: int) -> bool:
        """Whether `receive` would return without waiting."""
        awaited = self._awaited.get(rank)
        return awaited is not None and len(awaited) > 0 and awaited[0][0].item() != NO_WORD

    def receive(self, rank: int) -> int:
        """Wait for the next number that `rank` sends."""
        if not self._awaited.get(rank):
            self._await(rank)
        message, work = self._awaited[rank].popleft()
        work.wait()
        return int(message)

    def _await(self, rank: int) -> None:
        message = torch.tensor([NO_WORD], device="cpu")
        self._awaited[rank].append((message, _unrecorded(self._group().recv, [message], rank, WORD_TAG)))


def _unrecorded(post: Callable[..., Any], *args: Any) -> Any:
    """torch's profiler notes messages, and writes into memory that it has freed when one ends after it: words may be on
    their way for long. Without a profiler nothing is noted, and whoever has switched recording off finds it so."""
    if not (profiler._is_profiler_enabled or torch.autograd._profiler_enabled()):  # of all threads, of this one
        return post(*args)
    _record(False)
    try:
        return post(*args)
    finally:
        _record(True)
