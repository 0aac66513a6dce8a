"""What each rank records during training: bytes sent, seconds spent waiting, memory, and one step in detail."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from shardproof.data.encoding.pack import tokens_in_packed
from shardproof.train.folder import TIMELINE
from shardproof.train.watching.timeline import Timeline
from shardproof.zero.device import held_memory, peak_memory

if TYPE_CHECKING:
    import torch

    from shardproof.parallel.sequence import SequenceParallel
    from shardproof.zero.schedule.engine import Engine

EACH = 16  # with more ranks than this, only the minimum, median and maximum are recorded
WARM = 10  # the step whose timeline is kept: by then, plans are made and memory is allocated
# Masks of the tokens that a model gets, by their names in transformers and TRL. Other masks are for pixels and audio,
# or for prompts that are already part of these rows.
MASKS = ("attention_mask", "chosen_attention_mask", "rejected_attention_mask", "KL_attention_mask")
OF_PROMPTED = ("prompt_mask", "completion_mask")  # used if there are none of the above
NAMES = ("tokens", "seconds", "memory", "held", "gathered", "reduced", "away", "attention", "waited", "met")


class Recorder(TrainerCallback):
    """Counts what this rank does between logs, and records one step in detail.

    Args:
        folder: where to write the timeline of the step; None writes none.

    Attributes:
        sequence: the ranks that share rows with this one, if any.
        ranks: what each rank did up to the last log, by name, in the order of the ranks; see `across`.
        began: when the run began, in terms of `time.perf_counter`, as if it had never been interrupted.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder, self.ranks = folder, dict[str, list[float]]()
        self.engines: list[Engine] = []
        self.sequence: SequenceParallel | None = None
        self.timeline: Timeline | None = None
        self.step_to_watch, self.began = 0, time.perf_counter()
        self._before: tuple[float, ...] = (time.perf_counter(), *(0.0,) * 6)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        engine: Engine | None = getattr(model, "__dict__", {}).get("_shardproof")
        if engine is not None:
            known: Any = engine.streams.engines.values()  # including those of a reference, a teacher ...
            self.engines = list(known)
        self.step_to_watch = min(state.global_step + WARM, state.max_steps)
        self._before = self._counted()
        self.began = self._before[0]

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Around an evaluation or a checkpoint, during which nothing is trained: its seconds and bytes are not
        counted."""
        begun = self._counted()
        yield
        parts = zip(self._before, self._counted(), begun, strict=True)
        self._before = tuple(before + now - then for before, now, then in parts)

    def seconds(self) -> tuple[float, float]:
        """The seconds since the run began, and those of training since the last log."""
        now = time.perf_counter()
        return now - self.began, now - self._before[0]

    def go_on(self, run: float, since_log: float) -> None:
        """Count as if these seconds had passed before `on_train_begin`."""
        self.began -= run
        self._before = self._before[0] - since_log, *self._before[1:]

    def on_step_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, model: Any = None, **kwargs: Any
    ) -> None:
        if self.folder is None or not self.engines or state.global_step + 1 != self.step_to_watch:
            return
        watched = model.__dict__["_shardproof"]
        if watched.comm.rank < EACH:
            self.timeline = Timeline(watched, getattr(optimizer, "optimizer", optimizer))
            self.timeline.begin(self.step_to_watch)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True  # however many steps there were since the last log
        timeline, self.timeline = self.timeline, None
        if timeline is not None and self.folder is not None:
            timeline.end(self.folder / TIMELINE.format(rank=timeline.rank))

    def _counted(self) -> tuple[float, ...]:
        counters = [unit.counters for engine in self.engines for unit in engine.units]
        gathered = float(sum(counter.bytes_gathered for counter in counters))
        reduced = float(sum(counter.bytes_reduced + counter.bytes_between_replicas for counter in counters))
        away = float(sum(counter.bytes_between_nodes for counter in counters))
        waited = sum(engine.exposed.seconds() for engine in self.engines)
        attention = float(self.sequence.bytes_sent if self.sequence else 0)
        met = self.engines[0].streams.seconds if self.engines else 0.0
        return time.perf_counter(), gathered, reduced, away, attention, waited, met

    def take(self, tokens: float) -> list[float]:
        """What this rank did since the last call, in the order of `NAMES`, in bytes and seconds."""
        now = self._counted()
        seconds, *moved, waited, met = (a - b for a, b in zip(now, self._before, strict=True))
        self._before = now
        held = held_memory()
        return [tokens, seconds, float(peak_memory(held)), float(held), *moved, waited, met]


def across(table: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """What the ranks did, by name: a value for each rank in order or, with more than `EACH` ranks, the minimum, median
    and maximum, and their number as `of`. `table` holds what `Recorder.take` returned on each."""
    columns = dict(zip(NAMES, ([float(value) for value in column] for column in zip(*table, strict=True)), strict=True))
    parts = zip(columns.pop("tokens"), columns["seconds"], strict=True)
    rates = [tokens / max(took, 1e-9) for tokens, took in parts]
    columns = {"tokens_per_second": rates, **columns}
    if len(table) > EACH:
        columns = {n: [min(v), statistics.median(v), max(v)] for n, v in columns.items()} | {"of": [len(table)]}
    whole = {"memory", "held", "gathered", "reduced", "away", "attention", "of"}
    return {n: [int(x) if n in whole else round(x, 6) for x in values] for n, values in columns.items()}


def tokens_in(inputs: dict[str, Any]) -> int | torch.Tensor:
    """The number of tokens in a batch that are not padding, on the device of its masks, so that the host need not wait
    for an accelerator."""
    if "attention_mask" not in inputs and "position_ids" in inputs:
        return tokens_in_packed(inputs["position_ids"])
    masks = [name for name in MASKS if name in inputs] or OF_PROMPTED
    return sum(inputs[name].sum() for name in masks if name in inputs)
