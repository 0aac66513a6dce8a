"""The schedule: what each stage keeps, what is prefetched, what is in flight.

    stage  whole parameters live              gradients are reduced                      optimizer state
    0      always                             all-reduce, as backward produces them      whole
    1      from first use until the step      reduce-scatter at the end of backward      shard
    2      from first use until the step      reduce-scatter as backward produces them   shard
    3      around each use                    reduce-scatter as backward produces them   shard

A step makes whole values stale; they are gathered at their next first use, which overlaps with the forward pass.
"""

from __future__ import annotations

import weakref
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardproof.errors import EngineError
from shardproof.zero.autograd import SavedTensors, in_backward, plainly
from shardproof.zero.comm.collectives import Collectives
from shardproof.zero.device import address_of
from shardproof.zero.precision import MixedPrecision, cast_floats
from shardproof.zero.ranks.consensus import UPDATE
from shardproof.zero.ranks.invariants import Invariants
from shardproof.zero.ranks.written import Written
from shardproof.zero.schedule.belonging import BelongsToModel
from shardproof.zero.schedule.copies import Copies
from shardproof.zero.schedule.edits import Edits, keep_edits
from shardproof.zero.schedule.gradients import Gradients
from shardproof.zero.schedule.home import Home
from shardproof.zero.schedule.room import GATHERED_UNITS
from shardproof.zero.units.flat import Flat
from shardproof.zero.units.unit import Unit

if TYPE_CHECKING:
    from collections.abc import Callable


class Engine(BelongsToModel):
    """Owns the units of one sharded model and decides when they are gathered, released and reduced.

    Attributes:
        sharded: whether ranks hold parts (stages 1 to 3 on several ranks) or everything.
        successor: which use followed which, learned from the last pass; a prediction, never a promise.
        deterministic: whether gradients are added in the same order for any number of ranks; see passes.py.
        divisor: divides sums of gradients over ranks.
        changes: number of parameter changes on this rank, by steps and by edits.
        storages: the flat of each gathered buffer, by address.
        unfinished: while an optimizer steps, a function that ends that step if it did not end by itself.
    """

    def __init__(
        self, model: nn.Module, stage: int, comm: Collectives, precision: MixedPrecision | None, home: Home | None
    ) -> None:
        super().__init__(model)
        self.stage, self.comm, self.precision, self.home = stage, comm, precision, home
        self.pool, self.deterministic, self.divisor = comm.pool, False, float(comm.size)
        self.sharded = stage > 0 and comm.shards > 1
        self.units: list[Unit] = []
        self.whole_depth = 0
        self._reset_transient()
        self.take_seat()

    def _reset_transient(self) -> None:
        self.storages: dict[int, Flat] = {}
        self.empty_room()
        self.successor: dict[tuple[int, bool], tuple[int, bool]] = {}
        self.current: tuple[int, bool] = (-1, False)
        self.changes = 0
        self.edits = Edits(self)
        self.unfinished: Callable[[], None] | None = None
        self.copies = Copies()
        self.written = Written(self)
        self.gradients = Gradients(self)
        self.invariants = Invariants(self)

    def master_dtype(self, dtype: torch.dtype, trainable: bool) -> torch.dtype:
        """Under mixed precision, trained parameters have a float32 master; the others keep their dtype."""
        if self.precision is None or not trainable or not dtype.is_floating_point:
            return dtype
        return torch.promote_types(dtype, torch.float32)

    def reduce_dtype(self, flat: Flat) -> torch.dtype:
        if self.precision is None or not flat.dtype.is_floating_point:
            return flat.shard.dtype
        return self.precision.reduce

    # --- forward: a unit opens and closes --------------------------------------------------------

    def open(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        """Gather the unit and put plain tensors in place of its parameters. Returns cast inputs, or None."""
        if self.whole_depth:
            return self._cast(unit, args, kwargs)
        if unit.aborted:
            self.close_aborted()
        if unit.depth == 0:
            unit.begin()
            self.adopt()
            if unit.is_root and self.frugal:
                self.choose_room()
        unit.check_thread()
        unit.depth += 1
        if unit.depth > 1:
            unit.hooked.append(SavedTensors.push(self))
            return None
        try:
            if not in_backward():
                self.gradients.end_is_noted = False  # still set if the last backward raised an exception
                self.invariants.recomputed.clear()
            elif torch.is_grad_enabled():
                self.invariants.computed_again(unit)
            with plainly():
                self.acquire(unit)
                for flat in unit.flats:
                    flat.show()
            for slot in unit.slots:
                module, flat, i = slot.module(), slot.flat, slot.index
                if module is not None and module._parameters.get(slot.name) is flat.params[i]:
                    module._parameters[slot.name] = flat.open_views[i]  # type: ignore[assignment, index]
            unit.hooked.append(SavedTensors.push(self))
        except BaseException:
            self._restore(unit)
            raise
        return self._cast(unit, args, kwargs)

    def _cast(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        """The model's inputs cast to the compute dtype, or None."""
        cast = unit.is_root and self.precision is not None
        return cast_floats((args, kwargs), self.precision.compute) if cast else None  # type: ignore[union-attr]

    def adopt(self) -> None:
        """Take in changes of the model since the last call: edits through copies, and new parameters."""
        if in_backward():
            return
        if self.unfinished is not None:
            self.unfinished()
        if not self.root.depth:
            self.copies.take_in()
        if (builder := self._builder()) is not None and builder.has_more():
            with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode could not be trained
                builder.build()

    def close(self, unit: Unit) -> None:
        """Put the parameters back; at stage 3 release the unit unless it is needed next."""
        if unit.depth == 0 or unit.is_taken:
            return
        if unit.hooked.pop():
            SavedTensors.pop()
        if unit.depth > 1:
            unit.depth -= 1
            return
        look = not in_backward() and self.invariants.looks_at(unit)
        try:
            for flat in unit.flats:
                keep_edits(flat, look)
                flat.standing.look_over()
        finally:
            self._restore(unit)
        if not self.frugal or in_backward():
            return
        if unit.is_root and torch.is_grad_enabled():  # the first unit that backward needs, and the last
            self.release_unasked()
            return
        if unit.is_root:
            self.current = (-1, False)
        comes_next = not unit.is_root and self.successor.get((unit.index, False)) == (unit.index, True)
        if self.room == GATHERED_UNITS and not comes_next:
            self.release(unit)

    def _restore(self, unit: Unit) -> None:
        for slot in unit.slots:
            if slot.flat.open_views is not None:
                slot.put_back(slot.flat.open_views[slot.index])
        for flat in unit.flats:
            flat.open_views = None
        unit.depth, unit.hooked, unit.frame = 0, [], None

    def close_aborted(self) -> None:
        """Close the units whose forward ended without calling hooks (KeyboardInterrupt)."""
        for unit in self.units:
            if unit.aborted:
                for pushed in unit.hooked:
                    if pushed:
                        SavedTensors.pop()
                self._restore(unit)
                self.release(unit, entirely=True)

    # --- gather and release ----------------------------------------------------------------------

    def acquire(self, unit: Unit) -> None:
        """Make the unit's whole parameters available; start gathering the unit that is expected next."""
        use = (unit.index, in_backward())
        if in_backward():
            self.note_backward(unit.flats)
        new_use = use != self.current and not unit.is_root
        predicts = new_use and (self.sharded or self.home is not None)  # otherwise there is nothing to prefetch
        if not predicts and all(f.fresh and f.gathering is None for f in unit.flats):
            return
        with torch.inference_mode(False), torch.no_grad(), self.unseen():
            self._touch(unit)
            for flat in unit.flats:
                if not flat.fresh:
                    self._start_gather(flat)
            if new_use:
                self.successor[self.current] = use
                self.current = use
            self._prefetch(self.successor.get(self.current), unit)
            self.expect_from_home(self.successor.get(self.current))
            for flat in unit.flats:
                self._finish_gather(flat)

    def _touch(self, unit: Unit) -> None:
        if not self.frugal or unit.is_root:
            return
        if unit in self.resident:
            self.resident.remove(unit)
        self.make_room(unit)
        self.resident.append(unit)

    def _prefetch(self, use: tuple[int, bool] | None, present: Unit) -> None:
        if use is None or not (self.sharded or self.home) or use[1] != in_backward():
            return
        unit = self.units[use[0]]
        if all(f.fresh or f.gathering for f in unit.flats):
            return
        if self.frugal and unit not in self.resident:
            self.make_room(present)
            if len(self.resident) >= self.room:
                return
            self.resident.append(unit)
        for flat in unit.flats:
            if not flat.fresh and flat.gathering is None:
                self._start_gather(flat)
                flat.prefetched = flat.gathering is not None

    def _start_gather(self, flat: Flat) -> None:
        self._drop(flat)
        if self.sharded:
            position = self.want(flat, 2 * flat.index)
            if not self.may_start(2 * flat.index, position):
                self.streams.settle(position)
            flat.whole = flat.buffer()
            flat.gathering = flat.gather(flat.whole, self.tag(2 * flat.index))
            flat.gather_position = position
            counters, nbytes = flat.unit.counters, flat.nbytes
            counters.gathers += 1
            counters.bytes_gathered += nbytes
            counters.bytes_between_nodes += self.comm.leaving.in_row(nbytes)
        else:
            flat.gather_alone()
        self._keep(flat, flat.gathered)
        if self.sharded or self.frugal:
            self.note_peak(flat.unit)

    def _keep(self, flat: Flat, whole: torch.Tensor) -> None:
        """The buffer holds, or is about to hold, the present values."""
        flat.whole, flat.whole_edits, flat.whole_version = whole, whole._version, flat.version
        self.storages[address_of(whole)] = flat

    def _finish_gather(self, flat: Flat) -> None:
        if flat.gathering is None:
            return
        self.streams.settle(flat.gather_position)
        self.wait(flat.gathering, 2 * flat.index)
        flat.gathering = None
        flat.whole_edits = flat.gathered._version
        flat.unit.counters.prefetch_hits += flat.prefetched
        flat.prefetched = False

    def _drop(self, flat: Flat) -> None:
        """Forget the gathered buffer. Views of it that somebody still holds keep the memory alive."""
        if flat.gathering is not None:
            self.streams.settle(flat.gather_position)
            # Its messages are in flight: the buffer must not be reused yet.
            self.wait(flat.gathering, 2 * flat.index)
            flat.gathering, flat.prefetched = None, False
        elif flat.whole is not None and flat.whole is not flat.shard:
            self.absorb_edits(flat)
        if flat.whole is not None:
            self.storages.pop(address_of(flat.whole), None)
            self.copies.of_dropped(flat)
            flat.whole = None
            if self.sharded and flat.kept is None:  # the pool may reuse its memory
                flat.standing.forget()

    def absorb_edits(self, flat: Flat) -> None:
        """Take over edits through plain views of the gathered buffer (`p.data[i].zero_()`)."""
        if flat.whole is None or flat.gathering or flat.whole is flat.shard or flat.whole._version == flat.whole_edits:
            return
        if not flat.fresh:  # the view is older than the present values
            return
        for index in range(len(flat.names)):
            flat.take_over(index, flat.view(flat.gathered, index))
            self.written.note_left(flat, index, flat.view(flat.gathered, index))
        flat.whole_edits = flat.whole._version

    def fetch(self, flat: Flat) -> None:
        """Gather one flat now, outside the schedule."""
        if not flat.fresh:
            self._start_gather(flat)
        self._finish_gather(flat)

    def forget(self, flat: Flat) -> None:
        """Drop a gathered buffer whose edits have been handled."""
        if flat.whole is not None:
            flat.whole_edits = flat.whole._version
        self._drop(flat)
        self.count_residents()

    def release_all(self) -> None:
        for unit in self.units:
            if unit.depth == 0:
                self.release(unit, entirely=True)

    def hold_nothing(self) -> None:
        """Called on all ranks, where they may have gathered different units: from here on each needs the same ones."""
        if self.sharded and not in_backward():
            with torch.inference_mode(False), torch.no_grad(), self.unseen():
                self.leave_inference()
                self.release_all()

    def flat_of_storage(self, tensor: torch.Tensor) -> Flat | None:
        """The flat whose gathered buffer `tensor` lies in."""
        if tensor.layout is not torch.strided or tensor._is_zerotensor():  # the tangent of a constant
            return None
        return self.storages.get(address_of(tensor))

    def need(self, flat: Flat) -> None:
        """Make one flat available outside its unit's forward; of the root, only this one."""
        unit, backward = flat.unit, in_backward()
        if backward:
            self.note_backward([flat])
        else:
            self.copies.take_in_values()
        there = flat.fresh and flat.gathering is None
        if unit.is_root and not there:
            with torch.inference_mode(False), torch.no_grad(), self.unseen():
                self.fetch(flat)
        elif not unit.is_root and not (there and self.current == (unit.index, backward)):
            self.acquire(unit)

    # --- the optimizer's step --------------------------------------------------------------------

    def before_step(self) -> None:
        self.close_aborted()
        self.adopt()
        self.copies.refuse_late_edits()
        self.gradients.finish()
        self.meet(UPDATE)  # until then another rank may still use the values of before
        self.edits.met = False
        for flat in self.flats:
            if flat.gathering is not None:  # nobody here has used it, but an accelerator may still be sending its slice
                flat.prefetched = False
                self._finish_gather(flat)
            flat.before_change()

    def after_step(self) -> None:
        """Drop gathered buffers that the step made stale; those that stay in place are filled again, all at once."""
        filled: list[tuple[Flat, torch.Tensor]] = []
        for flat in self.flats:
            if not flat.fresh and flat.open_views is None:
                self._drop(flat)
                if self.stands and not self.sharded and (buffer := flat.standing.to_fill()) is not None:
                    filled.append((flat, buffer))
        if filled:
            with torch.inference_mode(False), torch.no_grad():
                torch._foreach_copy_([buffer for _, buffer in filled], [flat.shard for flat, _ in filled])
            for flat, buffer in filled:
                self._keep(flat, buffer)
        self.count_residents()
        self.current = (-1, False)
        self.gradients.updated = True
        self.gradients.generation += 1  # an optimizer may write to gradients, too
        self.leave_inference()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise EngineError(
            f"A sharded {type(self.model).__name__} cannot be pickled: each rank holds a part. Save "
            "shardproof.full_state_dict(model) instead."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine | None:
        if self.whole_depth:  # the copy has ordinary parameters, and so it is an ordinary model
            return None
        if self.gradients.dirty:
            self.gradients.finish()
        self.release_all()
        copy = object.__new__(Engine)
        memo[id(self)] = copy
        copy.__dict__.update(self.__dict__)
        copy._reset_transient()
        copy.take_seat()
        copy._model = weakref.ref(deepcopy(self.model, memo))
        copy.shown = deepcopy(self.shown, memo)
        copy.units = [deepcopy(u, memo) for u in self.units]
        copy.builder = memo[id(self.builder)] = self.builder.for_copy(copy, memo)
        return copy
