"""Which gathered units a rank holds at stage 3."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from shardproof.zero.autograd import in_backward
from shardproof.zero.device import free_memory
from shardproof.zero.ranks.turns import TakesTurns

if TYPE_CHECKING:
    from shardproof.zero.ranks.invariants import Invariants
    from shardproof.zero.schedule.home import Home
    from shardproof.zero.units.flat import Flat
    from shardproof.zero.units.unit import Unit

log = logging.getLogger("shardproof.zero")

GATHERED_UNITS = 2  # beyond the root: the one in use and the one that is prefetched
MINOR_BYTES, MINOR_SHARE = 2**21, 1 / 32  # of a buffer, and of its unit: an adapter of small rank beside its base


def mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB" if size >= 1e6 else f"{size / 1e6:.2f} MB"


class MakesRoom(TakesTurns):
    """The part of the engine that keeps the number of gathered units in bounds.

    Attributes:
        resident: gathered units other than the root, least recently used first.
        room: how many of them there may be.
        asked: the flats, by index, that the last backward pass needed. `asking`: those that the current one needs, or
            will need, as autograd has saved a part of them.
        training_room: the room in training: `GATHERED_UNITS`, plus as many as fit into `keep_gathered` bytes.
        inference_memory: bytes that gathered parameters may take between inference passes; None: half of the free
            memory.
        inference_passes: number of inference passes in a row.
        peak_bytes: largest total size of gathered buffers so far.
    """

    stage: int
    current: tuple[int, bool]
    home: Home | None
    successor: dict[tuple[int, bool], tuple[int, bool]]
    invariants: Invariants
    units: list[Unit]
    keep_gathered = 0
    training_room = GATHERED_UNITS
    inference_memory: int | None = None
    inference_passes = 0
    told = False

    @property
    def frugal(self) -> bool:
        """Whether units are gathered only around each use, because there is something to gather them from."""
        kept = self.home is not None and self.home.apart and self.home.frozen
        return self.stage == 3 and (self.sharded or kept)

    @property
    def stands(self) -> bool:
        """Whether gathered buffers stay until the step, on the computing device, so that torch itself can compare what
        graphs have saved with the present values; see standing.py."""
        return not self.frugal and self.home is None and not self.deterministic

    @property
    def root(self) -> Unit:
        return self.units[0]

    @property
    def flats(self) -> list[Flat]:
        return [flat for unit in self.units for flat in unit.flats]

    def running(self) -> str:
        return next((unit.name for unit in reversed(self.units) if unit.depth), "")

    def _drop(self, flat: Flat) -> None:
        raise NotImplementedError

    def release(self, unit: Unit, entirely: bool = False) -> None:
        """Drop the unit's gathered buffers; minor ones only if `entirely`."""
        if unit in self.resident:
            self.resident.remove(unit)
        if self.sharded or self.frugal:
            for flat in unit.flats:
                if entirely or not flat.minor:
                    self._drop(flat)

    def fit_room(self) -> None:
        """Set the room, once all units are known."""
        largest = 0
        for unit in self.units[1:]:
            sizes = [flat.nbytes for flat in unit.flats]
            largest = max(largest, sum(sizes))
            for flat, size in zip(unit.flats, sizes, strict=True):
                flat.minor = size <= min(MINOR_BYTES, MINOR_SHARE * sum(sizes))
        self.training_room = GATHERED_UNITS + (self.keep_gathered // largest if largest else 0)
        if self.inference_passes == 0:
            self.room = self.training_room

    def empty_room(self) -> None:
        """Initial state: hold nothing, and expect training."""
        self.asked: set[int] = set()
        self.asking: set[int] = set()
        self.resident: list[Unit] = []
        self.room, self.inference_passes = self.training_room, 0
        self.peak_bytes = 0

    def note_peak(self, unit: Unit) -> None:
        unit.counters.gathered_peak_bytes = max(unit.counters.gathered_peak_bytes, unit.gathered_bytes)
        self.peak_bytes = max(self.peak_bytes, sum(u.gathered_bytes for u in self.units))

    def expect_from_home(self, use: tuple[int, bool] | None) -> None:
        """Have the home read ahead the unit after the next."""
        later = None if self.home is None or use is None else self.successor.get(use)
        for flat in self.units[later[0]].flats if later is not None else ():
            if flat.home is not None and not flat.fresh:
                flat.home.expect(flat.sent)

    def make_room(self, *keep: Unit) -> None:
        for other in list(self.resident):
            if len(self.resident) < self.room:
                return
            if other.depth == 0 and other not in keep:
                self.release(other)

    def count_residents(self) -> None:
        """Remove the units that hold no gathered buffers any more, apart from minor ones."""
        self.resident = [u for u in self.resident if any(f.whole is not None and not f.minor for f in u.flats)]

    def note_backward(self, flats: list[Flat]) -> None:
        """A backward pass needs these."""
        self.asking.update(flat.index for flat in flats)
        self.gradients.note_backward()

    def used_up(self, flat: Flat) -> None:
        """Every use of one gather of the flat has contributed its gradient."""
        if flat.minor or not self.frugal or flat.unit.depth:
            return
        if self.room == GATHERED_UNITS or flat.unit is self.root:
            self._drop(flat)
            self.count_residents()

    def backward_is_over(self) -> None:
        self.invariants.backward_is_over()
        self.current = (-1, False)
        self.asked, self.asking = self.asking, set()
        for flat in self.flats:
            if any(flat.requires_grad):  # frozen ones of the root and the last units serve the next step
                self.used_up(flat)

    def release_unasked(self) -> None:
        """Drop buffers of the root that backward will not need, such as an embedding, whose gradient does not depend on
        its weights. A wrong guess (a checkpointed head, the first time) costs a gather."""
        for flat in self.root.flats:
            if flat.index not in self.asked | self.asking:
                self._drop(flat)

    def choose_room(self) -> None:
        """[Note: one inference pass after the other]

        Generation runs the model once per token. From the second pass in a row on, parameters stay gathered if there is
        enough memory, and no rank has to wait for another; otherwise each pass gathers unit by unit. The next training
        pass, or a step, goes back to a few units.
        """
        if in_backward():
            return
        if torch.is_grad_enabled():
            self.leave_inference()
            return
        self.inference_passes += 1
        if self.inference_passes != 2:
            return
        whole = sum(flat.nbytes for flat in self.flats)
        limit = self.inference_memory
        if limit is None:
            limit = free_memory(self.comm.device, self.comm.size) // 2
        if whole <= limit:
            self.room = len(self.units)
        if not self.told and self.comm.rank == 0:
            self.told = True
            if whole <= limit:
                log.warning("inference: %s of parameters stay gathered on each rank until training goes on", mb(whole))
            else:
                text = (
                    "inference gathers %s in every pass: to keep them takes more than the %s allowed. Allow more with "
                )
                log.warning(text + "shardproof.shard(..., inference_memory=BYTES).", mb(whole), mb(limit))

    def leave_inference(self) -> None:
        if self.inference_passes == 0:
            return
        self.room, self.inference_passes = self.training_room, 0
        self.make_room()
