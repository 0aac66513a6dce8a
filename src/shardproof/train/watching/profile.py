"""--profile: a trace of a few steps on each rank by torch's profiler, with named gathers and reductions."""

from __future__ import annotations

import gzip
import json
import logging
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import record_function
from transformers import TrainerCallback

from shardproof.train.folder import TRACE
from shardproof.train.watching.recorder import WARM

if TYPE_CHECKING:
    from shardproof.zero.ranks.turns import Watcher
    from shardproof.zero.schedule.engine import Engine
    from shardproof.zero.units.unit import Flat

log = logging.getLogger("shardproof")

START, WAIT = "start: ", "wait: "


class Named:
    """Watches an engine, and reports its operations to the profiler."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.watcher: Watcher | None = engine.watcher  # the previous watcher
        engine.watcher = self

    def end(self) -> None:
        self.engine.watcher = self.watcher

    def wanted(self, flat: Flat, operation: int) -> None:
        with record_function(START + _name(flat, operation)):
            if self.watcher is not None:
                self.watcher.wanted(flat, operation)

    @contextmanager
    def waits(self, operation: int) -> Iterator[None]:
        inner = nullcontext() if self.watcher is None else self.watcher.waits(operation)
        with record_function(WAIT + _name(self.engine.flat_at(operation // 2), operation)), inner:
            yield

    @contextmanager
    def meets(self, what: str) -> Iterator[None]:
        inner = nullcontext() if self.watcher is None else self.watcher.meets(what)
        with record_function(f"meet: {what}"), inner:
            yield


def _name(flat: Flat, operation: int) -> str:
    """For example "gather layers.3 #7"; the number distinguishes the buffers of a unit."""
    return f"{'reduce' if operation % 2 else 'gather'} {flat.unit.name} #{flat.index}"


class Profiler(TrainerCallback):
    """Traces `steps` steps, once plans are made and memory is allocated, and writes the trace to the run folder.

    Args:
        folder: the run folder.
        steps: how many steps to trace.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self._watchers: list[Named] = []
        self._profiler: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        engine: Engine = model.__dict__["_shardproof"]
        engines: Any = engine.streams.engines
        self._watchers = [Named(each) for each in engines.values()]
        left = state.max_steps - state.global_step
        active = max(1, min(self.steps, left - 1))
        wait = max(0, min(WARM + 1, left - active - 1))
        self._profiler = torch.profiler.profile(  # of what torch can trace: not every accelerator
            schedule=torch.profiler.schedule(wait=wait, warmup=1, active=active, repeat=1),
            on_trace_ready=lambda profiler: self._write(profiler, engine.comm.rank),
        )
        self._profiler.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._profiler.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._profiler.stop()
        for watcher in reversed(self._watchers):
            watcher.end()

    def _write(self, profiler: Any, rank: int) -> None:
        file = self.folder / TRACE.format(rank=rank)
        try:
            profiler.export_chrome_trace(str(file))
            with gzip.open(file, "rt", encoding="utf-8") as text:
                trace = json.load(text)
            trace["traceEvents"] += in_flight(trace["traceEvents"], rank)
            with gzip.open(file, "wt", encoding="utf-8", compresslevel=5) as out:
                json.dump(trace, out, separators=(",", ":"))
        except OSError as error:  # as for a timeline, see there
            with suppress(OSError):
                file.unlink()
            log.warning("%s cannot be written: %s", file, error.strerror or error)


def in_flight(events: list[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    """A separate track for each gather and reduction, from the request until its result is used.

    On the CPU, threads that the profiler does not see move the data: their spans are built from start and end.
    """
    own = [event for event in events if str(event.get("name", "")).startswith((START, WAIT)) and "dur" in event]
    wanted: dict[str, deque[float]] = defaultdict(deque)
    spans: list[dict[str, Any]] = []
    for event in sorted(own, key=lambda event: event["ts"]):
        what = event["name"].partition(": ")[2]
        if event["name"].startswith(START):
            wanted[what].append(event["ts"])
        elif wanted[what]:
            begin, end = wanted[what].popleft(), event["ts"] + event["dur"]
            same = {"name": what, "cat": "in flight", "pid": f"in flight, rank {rank}", "id": len(spans)}
            spans += [{**same, "ph": "b", "ts": begin}, {**same, "ph": "e", "ts": end}]
    return spans
