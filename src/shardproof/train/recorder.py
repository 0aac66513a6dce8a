"""What each rank counts while it trains: bytes on the wire, seconds spent waiting, memory, and one step in detail.

[Note: what a wait is]
Gathers and reductions run beside the computing. What they cost is the time in which nothing is computed because a
result is not there: on the CPU the seconds a rank is blocked, on an accelerator those between two events on its stream
around the wait. So nothing has to be synchronised before a record is written anyhow.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import TrainerCallback

from shardproof.train.folder import TIMELINE
from shardproof.train.timeline import DeviceClock, HostClock, Timeline
from shardproof.zero.device import held_memory, peak_memory

if TYPE_CHECKING:
    from shardproof.zero.schedule import Engine
    from shardproof.zero.unit import Flat

EACH = 16  # of more ranks than this, the least, the middle and the most are recorded
WARM = 10  # the step whose timeline is kept: plans are made by then, memory has been taken
AT_ONCE = 8192  # waits that are kept before they are added up
NAMES = ("tokens", "seconds", "memory", "held", "gathered", "reduced", "waited", "met")


class Waits:
    """Adds up the seconds in which an engine waits for data; see [Note: what a wait is]."""

    def __init__(self, device: torch.device) -> None:
        self.clock = HostClock() if device.type == "cpu" else DeviceClock(device)
        self._waits: list[tuple[Any, Any]] = []
        self._seconds = 0.0

    def wanted(self, flat: Flat, operation: int) -> None: ...

    @contextmanager
    def waits(self, operation: int) -> Iterator[None]:
        begin = self.clock.mark()
        yield
        self._waits.append((begin, self.clock.mark()))
        if len(self._waits) > AT_ONCE:  # the first half is of steps long done
            self._add_up(AT_ONCE // 2)

    @contextmanager
    def meets(self, what: str) -> Iterator[None]:
        yield

    def take(self) -> float:
        """Seconds since the last call."""
        self._add_up(len(self._waits))
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _add_up(self, count: int) -> None:
        self._seconds += sum(self.clock.seconds(begin, end) for begin, end in self._waits[:count])
        del self._waits[:count]


class Recorder(TrainerCallback):
    """Counts what this rank does from log to log, and records one step in detail.

    Args:
        folder: where the timeline of the step goes; without one there is none.

    Attributes:
        ranks: of the last log what each rank did, by name, in the order of the ranks; see `across`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder, self.ranks = folder, dict[str, list[float]]()
        self.engines: list[Engine] = []
        self.waits: Waits | None = None
        self.timeline: Timeline | None = None
        self.step_to_watch = 0
        self._before = (time.perf_counter(), 0.0, 0.0, 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        engine: Engine | None = getattr(model, "__dict__", {}).get("_shardproof")
        if engine is not None:
            self.waits = Waits(engine.comm.device)
            self.engines = cast(
                "list[Engine]", list(engine.streams.engines.values())
            )  # with those of a reference, a teacher ...
            for each in self.engines:
                each.watcher = self.waits
        self.step_to_watch = min(state.global_step + WARM, state.max_steps)
        self._before = self._counted()

    def on_step_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, model: Any = None, **kwargs: Any
    ) -> None:
        if self.folder is None or self.waits is None or state.global_step + 1 != self.step_to_watch:
            return
        watched = model.__dict__["_shardproof"]
        if watched.comm.rank < EACH:
            self.timeline = Timeline(watched, getattr(optimizer, "optimizer", optimizer), self.waits)
            self.timeline.begin(self.step_to_watch)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        timeline, self.timeline = self.timeline, None
        if timeline is not None and self.folder is not None:
            timeline.end(self.folder / TIMELINE.format(rank=timeline.rank))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for engine in self.engines:
            engine.watcher = None

    def _counted(self) -> tuple[float, float, float, float]:
        counters = [unit.counters for engine in self.engines for unit in engine.units]
        gathered = float(sum(counter.bytes_gathered for counter in counters))
        reduced = float(sum(counter.bytes_reduced + counter.bytes_between_replicas for counter in counters))
        met = self.engines[0].streams.seconds if self.engines else 0.0
        return time.perf_counter(), gathered, reduced, met

    def take(self, tokens: float) -> list[float]:
        """What this rank did since the last call, in the order of `NAMES`. Bytes and seconds."""
        now = self._counted()
        seconds, gathered, reduced, met = (a - b for a, b in zip(now, self._before, strict=True))
        self._before = now
        waited = self.waits.take() if self.waits is not None else 0.0
        held = float(held_memory())
        return [tokens, seconds, float(peak_memory()), held, gathered, reduced, waited, met]


def across(table: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """What the ranks did, by name: of each rank in order, or of more than `EACH` of them the least, the middle and the
    most, with `of`, their number. `table` holds what `Recorder.take` gave on each."""
    columns = dict(zip(NAMES, ([float(value) for value in column] for column in zip(*table, strict=True)), strict=True))
    parts = zip(columns.pop("tokens"), columns["seconds"], strict=True)
    rates = [tokens / max(took, 1e-9) for tokens, took in parts]
    columns = {"tokens_per_second": rates, **columns}
    if len(table) > EACH:
        columns = {n: [min(v), statistics.median(v), max(v)] for n, v in columns.items()} | {"of": [len(table)]}
    whole = {"memory", "held", "gathered", "reduced", "of"}
    return {n: [int(x) if n in whole else round(x, 6) for x in values] for n, values in columns.items()}
