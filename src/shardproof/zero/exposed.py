"""How long a rank computes nothing because it waits for data.

[Note: what a wait is]
Gathers and reductions overlap with computing. Their cost is the time in which nothing is computed because a result has
not arrived: on the CPU the seconds a rank is blocked, on an accelerator the time between two events on its stream
around the wait. So nothing has to be synchronised until somebody asks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

AT_ONCE = 8192  # waits that are kept before they are summed


class Clock:
    """Marks moments, and measures the seconds between two of them: in the process, if it computes on the CPU, or on the
    current stream of the accelerator, where nothing waits for a moment until its time is asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.of_host = device.type in ("cpu", "meta")

    def mark(self) -> Any:
        if self.of_host:
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))  # `device` may differ from the current device
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        if self.of_host:
            return float(end - begin)
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


class Exposed:
    """Adds up the seconds in which an engine waits for data; see [Note: what a wait is]."""

    def __init__(self, device: torch.device) -> None:
        self.clock = Clock(device)
        self._waits: list[tuple[Any, Any]] = []
        self._seconds = 0.0

    @contextmanager
    def waits(self) -> Iterator[None]:
        begin = self.clock.mark()
        yield
        self._waits.append((begin, self.clock.mark()))
        if len(self._waits) > AT_ONCE:  # the first half belongs to steps that ended long ago
            self._add_up(AT_ONCE // 2)

    def seconds(self) -> float:
        """Since the engine was made."""
        self._add_up(len(self._waits))
        return self._seconds

    def _add_up(self, count: int) -> None:
        self._seconds += sum(self.clock.seconds(begin, end) for begin, end in self._waits[:count])
        del self._waits[:count]
