"""What holds in every healthy run, and is silently wrong elsewhere: checked early and seldom, so that it costs nothing.

- replicas: where ranks hold the same (whole parameters at stage 0, the same part of several copies), it is the same,
  after the first step and every hundred;
- the first step of an optimizer changes what has a gradient;
- forward edits parameters in a way that torch counts, or is looked at from then on (`p.data.mul_` is not counted);
- what has a gradient is updated by an optimizer, and by one only.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import Optimizer

from shardproof.errors import DesyncError
from shardproof.zero.autograd import asked_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardproof.zero.comm.collectives import Collectives
    from shardproof.zero.schedule.engine import Engine
    from shardproof.zero.tensors.parameter import ShardedParameter
    from shardproof.zero.units.flat import Flat
    from shardproof.zero.units.unit import Unit

log = logging.getLogger("shardproof.zero")

_REPLICAS_EVERY = 100  # ends of a step
_COVERED_BY = 10  # ends of a step: by then every optimizer has had its turn
WATCHED_STEPS = 3  # of each optimizer
_ASKED = 2  # passes without gradients
_ROW = 256  # elements
_SPREAD = 0x9E3779B97F4A7C15 - 2**64  # 2^64 by the golden ratio

Pairs = list[tuple["ShardedParameter", torch.Tensor]]  # a parameter and this rank's slice of it


def digest(values: torch.Tensor) -> int:
    """A number that differs, in all likelihood, where one bit of `values` differs, or where two of them stand."""
    return int(digest_of(values))


def digest_of(values: torch.Tensor) -> torch.Tensor:
    """`digest` where the values lie: 0-D, int64."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[min(8, values.element_size())]
    bits = values.detach().contiguous().view(-1).view(kind)
    rows = bits[: bits.numel() // _ROW * _ROW].view(-1, _ROW)
    rest = bits[rows.numel() :].to(torch.int64)
    sums = rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64), rest
    return torch.stack([(part * _factors(part)).sum() for part in sums]).sum()


def _factors(values: torch.Tensor) -> torch.Tensor:
    """Odd numbers that follow no pattern; int64 wraps around."""
    numbers = torch.arange(1, values.numel() + 1, device=values.device) * _SPREAD
    return (numbers ^ (numbers >> 29)) | 1


def differing(comm: Collectives, digests: list[int]) -> list[int]:
    """Which of `digests` are not the same on all ranks."""
    return [i for i, alike in enumerate(comm.agree(digests)) if not alike]


def on_any_rank(comm: Collectives, mine: Sequence[bool]) -> list[bool]:
    """For each of `mine` whether it holds here or on another rank."""
    flags = torch.tensor(mine, dtype=torch.int64, device="cpu")
    comm.agree([], flags)
    return [flag > 0 for flag in flags.tolist()]


def some(names: list[str]) -> str:
    """The first five of `names`, quoted."""
    quoted = [f"'{n}'" for n in names[:5]]
    return ", ".join(quoted) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _rates(optimizer: Optimizer) -> dict[int, float]:
    """The learning rate of each parameter; 0, of which no step is expected, where the optimizer finds its own (None, a
    function)."""
    rates = [group.get("lr", 1.0) for group in optimizer.param_groups]
    known = [float(rate) if isinstance(rate, int | float | torch.Tensor) else 0.0 for rate in rates]
    return {id(p): rate for rate, group in zip(known, optimizer.param_groups, strict=True) for p in group["params"]}


def _should_move(values: torch.Tensor, grad: torch.Tensor, rate: float) -> bool:
    """In half precision every gradient; else one whose step is no rounding error (a bias before a BatchNorm has one of
    1e-10, which is zero)."""
    if grad.numel() == 0:
        return False
    if values.dtype.itemsize < 4:
        return bool(grad.any())
    return float(grad.abs().max()) * rate > 1e-5 * float(values.abs().max())


class Invariants:
    """The checks of one engine.

    Attributes:
        ends: how many steps have ended. Gradients that are looked at once more (by clipping) end none.
        updated: for each parameter that an optimizer has updated, by which and after which end.
        asked: passes of each unit without gradients in this step, by its index.
        lacking: parameters that had a gradient at the end before, and no optimizer.
        recomputed: units that the present backward pass has opened; `lost` those of which a loss was told.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ends = 0
        self.asked: Counter[int] = Counter()
        self.updated: dict[tuple[int, int], tuple[weakref.ref[Optimizer], int]] = {}
        self.lacking: set[str] = set()
        self.recomputed: list[Unit] = []
        self.lost: set[str] = set()

    @property
    def early(self) -> bool:
        """Whether this is a step in which values are compared that forward left behind: one of the first, or now and
        then another."""
        return self.ends < _COVERED_BY or self.ends % _REPLICAS_EVERY == 2

    @property
    def compares_at_this_end(self) -> bool:
        """Whether the end of this step is one at which the ranks compare the values of what they hold."""
        return (self.ends + 1) % _REPLICAS_EVERY == 2

    def looks_at(self, unit: Unit) -> bool:
        """Whether they are compared after this pass of `unit`. Of those without gradients, of which a generation makes
        thousands, after two in a step."""
        if not self.early or torch.is_grad_enabled():
            return self.early
        self.asked[unit.index] += 1
        return self.asked[unit.index] <= _ASKED

    def computed_again(self, unit: Unit) -> None:
        """Somebody computes with a unit in a backward pass, which may ask for its gradients, or for others only."""
        params = (p for flat in unit.flats for p in flat.params if flat.requires_grad[p.index])
        with self.engine.unseen(), torch._C.DisableTorchFunctionSubclass():
            if (p := next(params, None)) is not None and asked_for(torch.autograd.graph.get_gradient_edge(p).node):
                self.recomputed.append(unit)

    def backward_is_over(self) -> None:
        """Who computes with a unit once more in a backward pass means to have its gradients."""
        units, self.recomputed = self.recomputed, []
        for unit in units:
            trained = [flat for flat in unit.flats if any(flat.requires_grad)]
            if unit.name in self.lost or not trained or any(any(flat.used) for flat in trained):
                continue
            self.lost.add(unit.name)
            log.warning(
                "'%s' was computed once more in a backward pass, and none of its parameters has a gradient. An "
                "autograd.Function that is given them inside of its forward finds no gradients of them by "
                "torch.autograd.grad: use torch.utils.checkpoint, or call the Function around the forward of '%s'.",
                *(unit.name, unit.name),
            )

    # --- at the end of a step, on all ranks alike ---------------------------------------------------

    def end(self, contributed: bool) -> None:
        """Gradients are final, and an optimizer may step.

        Args:
            contributed: whether any rank has added to them since the last time.
        """
        engine = self.engine
        if not contributed:
            return
        if engine.sharded and self.early:
            self._agree_on_edited(engine.flats)
        self.ends += 1
        self.asked.clear()
        replicated = engine.comm.size > 1 and not (engine.sharded and engine.comm.replicas == 1)
        if replicated and self.ends % _REPLICAS_EVERY == 2:
            self.check_replicas()
        if self.ends in (_COVERED_BY - 1, _COVERED_BY) and self.updated:
            lacking = [
                name
                for flat in engine.flats
                for index, name in enumerate(flat.names)
                if flat.has_grad[index] and flat.requires_grad[index] and (flat.index, index) not in self.updated
            ]
            missing = [name for name in lacking if name in self.lacking]  # not one that has just been unfrozen
            self.lacking = set(lacking)
            if missing and engine.comm.rank == 0:
                log.warning(
                    "%d trainable parameters have a gradient, but no optimizer updates them: %s. Pass them to the "
                    "optimizer, or freeze them with requires_grad_(False).",
                    *(len(missing), some(missing)),
                )

    def _agree_on_edited(self, flats: list[Flat]) -> None:
        """What one rank has seen to be edited in forward, all look at: an edit may be in the slices of some only."""
        mine = [index in flat.edited for flat in flats for index in range(len(flat.names))]
        found = iter(on_any_rank(self.engine.comm, mine))
        for flat in flats:
            flat.edited = {index for index in range(len(flat.names)) if next(found)}

    def refuse_edits(self, found: list[str] | None = None) -> None:
        """Some ranks have changed parameters that others have not; those `found`, or where counts of changes differ."""
        if found is None:
            flats = self.engine.flats
            names = [name for flat in flats for name in flat.names]
            differ = differing(self.engine.comm, [version for flat in flats for version in flat.versions])
            found = [names[i] for i in differ]
        raise DesyncError(
            f"{some(found)}: edited or loaded on some ranks only (under `if rank == 0`?). Where "
            "ranks hold slices, the others keep their part of the old values. Make the same edit on every rank."
        )

    def check_replicas(self, only: list[tuple[Flat, int]] | None = None) -> None:
        """Where ranks hold the same part, it has the same values; of all parameters, or `only` these, by index."""
        comm, flats = self.engine.comm, self.engine.flats
        agree = comm.agree_on_parts if self.engine.sharded else comm.agree
        if only is None and all(agree([digest(flat.shard) for flat in flats])):
            return
        only = [(flat, i) for flat in flats for i in range(len(flat.names))] if only is None else only
        names = [flat.names[i] for flat, i in only]
        same = agree([digest(flat.locals[i]) for flat, i in only])
        differ = [i for i, alike in enumerate(same) if not alike]
        if not differ:
            return
        raise DesyncError(
            f"{some([names[i] for i in differ])}: the ranks hold different values. They were edited on some ranks only "
            "(under `if rank == 0`?), or by something random. Make the same edit on every rank. Or gradients were "
            "clipped by a norm that has others in it, which are no part of a sharded model: shard their module, too."
        )

    # --- around the first steps of an optimizer -------------------------------------------------------

    def before_step(self, optimizer: Optimizer, pairs: Pairs) -> list[tuple[bool, int]]:
        """For each parameter whether its gradient should move it, and the digest of this rank's values."""
        rates = _rates(optimizer)
        return [
            (_should_move(local, local.grad, rates.get(id(local), 1.0)), digest(local))
            if local.grad is not None
            else (False, 0)
            for _, local in pairs
        ]

    def after_step(self, optimizer: Optimizer, pairs: Pairs, before: list[tuple[bool, int]]) -> None:
        """Compare with what `before_step` returned; on all ranks alike."""
        engine, count = self.engine, len(pairs)
        pushed = [pushes for pushes, _ in before]
        moved = [pushes and digest(local) != old for (_, local), (pushes, old) in zip(pairs, before, strict=True)]
        engine.meet("check the first update")
        found = on_any_rank(engine.comm, [*pushed, *moved])
        rates = _rates(optimizer)
        stuck = [
            p.qualified_name
            for (p, local), pushes, moves in zip(pairs, found[:count], found[count:], strict=True)
            if pushes and not moves and rates.get(id(local)) != 0
        ]
        if stuck and engine.comm.rank == 0:
            log.warning(
                "%d parameters have a gradient, but the first step of %s did not change them: %s. In half precision an "
                "update of less than about 1/256 of a weight is lost: keep float32 masters "
                "(shard(..., mixed_precision=torch.bfloat16)), or raise the learning rate.",
                *(len(stuck), type(optimizer).__name__, some(stuck)),
            )

    def note_update(self, optimizer: Optimizer, pairs: Pairs) -> None:
        """An optimizer updates these parameters."""
        twice = []
        for p, local in pairs:
            key = p.flat.index, p.index
            known, end = self.updated.get(key, (None, -1))
            if local.grad is not None and known is not None and known() is not optimizer and end == self.ends:
                twice.append(p.qualified_name)
            self.updated[key] = weakref.ref(optimizer), self.ends
        if twice and self.engine.comm.rank == 0:
            log.warning("%s: updated by two optimizers in one step. Give each parameter to one.", some(twice))
