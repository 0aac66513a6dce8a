"""What the user's code writes to parameters and gradients, which has to be the same on all ranks.

[Note: written]
Each rank keeps its slice of what it writes. If ranks write different values (a running mean of a rank's own rows, a
draw with a seed per rank), what they hold together is nobody's value, and no later step shows it. So a rank takes a
digest of whatever it writes that is not sharded itself, where it lies, and the ranks compare these at the end of a
step, with what they agree upon there anyway.

Edits are of two kinds. Those that the engine carries out (`p.mul_(2)`, `p.copy_(x)`, `p.grad.add_(x)`) come in one
order and number on all ranks, so all of a step are digested together. Those that were done to a plain tensor which
stands in for a parameter (in forward, through a view) are found at a rank's own time: there the values that were left
count, and where the digests differ, because a rank has not come to that forward, the values themselves decide. Where
the engine has changed these since, only the ranks that have left values are compared.

The numbers that an optimizer steps with are compared likewise, one step later: a scheduler that goes by the loss of a
rank's own rows gives each rank a learning rate of its own.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch

from shardproof.errors import DesyncError
from shardproof.zero.ranks.frames import place_in_user_code
from shardproof.zero.ranks.invariants import differing, digest_of, on_any_rank, some
from shardproof.zero.tensors.parameter import ShardedTensor

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

    from shardproof.zero.schedule.engine import Engine
    from shardproof.zero.units.flat import Flat

_EXACT = 2**20  # elements: of more than that a digest looks at about as many, evenly spread
_FACTOR = 1_000_003
BITS = 2**62 - 1  # of a number, and of minus it
_SETTINGS = "lr", "weight_decay", "momentum", "betas"  # of a group of an optimizer
_SCALES = {"mul_", "div_", "_foreach_mul_", "_foreach_div_"}

_Key = tuple[bool, int, int]  # is it a gradient, of which flat, of which parameter


def _digest_of_settings(groups: list[Any]) -> int:
    """Of one setting of all groups what is told without waiting for a device."""
    values = (x for each in groups for x in (each if isinstance(each, (tuple, list)) else (each,)))
    return zlib.crc32(repr([x for x in values if isinstance(x, Number)]).encode())  # NaN is equal to NaN here


def _sample(values: torch.Tensor) -> torch.Tensor:
    flat = values.detach().reshape(-1)
    return flat[:: (flat.numel() // _EXACT) | 1]  # an odd stride meets every column of a power of two


def _digest_of_left(values: torch.Tensor) -> torch.Tensor:
    """Of values that a rank may have gathered: a conversion of its slice need not keep the bits of NaN and of -0.0."""
    found = _sample(values)
    if found.is_floating_point() and found.element_size() > 1:
        found = torch.where(found != found, torch.nan, found) + 0.0
    return digest_of(found)


def _read(digests: dict[_Key, torch.Tensor]) -> dict[_Key, int]:
    """Wait for the device once."""
    if not digests:
        return {}
    device = next(iter(digests.values())).device
    return dict(zip(digests, torch.stack([t.to(device) for t in digests.values()]).tolist(), strict=True))


class Written:
    """Values that one rank has written since the last end of a step.

    Attributes:
        numbers: by parameter, the operations that the engine carried out, with their plain numbers; `tensors`: digests
            of their plain tensors, which stay on their device; `places`: where in user code.
        left: by parameter, the digest of the values after an edit of a plain tensor; `replaced`: of those that the
            engine has changed since.
        stepped: for each step of an optimizer and each of `_SETTINGS`: the optimizer's class, the setting, and its
            values in all groups.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.clear()

    def clear(self) -> None:
        """Start again, after ranks have compared."""
        self.numbers: dict[_Key, int] = {}
        self.tensors: dict[_Key, torch.Tensor] = {}
        self.places: dict[_Key, str] = {}
        self.left: dict[_Key, torch.Tensor] = {}
        self.replaced: dict[_Key, torch.Tensor] = {}
        self.stepped: list[tuple[str, str, list[Any]]] = []

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer gets its slices: for a step, and again after a closure. Numbers that are tensors do not count:
        the host would have to wait for them."""
        if not self.engine.comm.real:
            return
        for name in _SETTINGS:
            self.stepped.append((type(optimizer).__name__, name, [g.get(name) for g in optimizer.param_groups]))

    def note(self, key: _Key, operation: str, operands: Iterable[Any]) -> None:
        """The engine carries out `operation` on a parameter or a gradient. Only plain `operands` count; not the factor
        of clipping, a one-element tensor that gradients are multiplied by, as the host would have to wait for it in
        each step."""
        if not self.engine.comm.real:
            return
        operands = list(operands)
        text = operation + repr([x for x in operands if isinstance(x, Number)])
        self.numbers[key] = (self.numbers.get(key, 0) * _FACTOR + zlib.crc32(text.encode())) & BITS
        self.places[key] = place_in_user_code(sys._getframe(1))
        plain = [x for x in operands if isinstance(x, torch.Tensor) and not isinstance(x, ShardedTensor)]
        counted = [x for x in plain if not (key[0] and operation in _SCALES and x.numel() == 1)]
        if not counted:
            return
        with self.engine.unseen(), torch.no_grad():
            for values in counted:
                before, digest = self.tensors.get(key), digest_of(_sample(values))
                self.tensors[key] = digest if before is None else before.to(digest.device) * _FACTOR + digest

    def note_left(self, flat: Flat, index: int, whole: torch.Tensor) -> None:
        """An edit of a plain tensor that stands in for a parameter has resulted in `whole`."""
        if self.engine.comm.real:
            with self.engine.unseen(), torch.no_grad():
                self.left[False, flat.index, index] = _digest_of_left(whole)

    def _note_kept(self) -> None:
        """Note the values of gathered buffers that contain this rank's shard: they may hold edits that torch does not
        count (`p.data.mul_()`). See [Note: one copy] in units/flat.py."""
        for flat in self.engine.flats:
            if flat.kept is not None and flat.fresh and flat.gathering is None:
                for index in range(len(flat.names)):
                    self.note_left(flat, index, flat.view(flat.gathered, index))

    def note_changed(self, flat: Flat, indices: Iterable[int]) -> None:
        """The engine has changed parameters, so earlier edits are gone. A rank without an edit may have had the same
        values, so only ranks that had one are compared."""
        for index in indices if self.left else ():
            key = False, flat.index, index
            if key in self.left:
                self.replaced[key] = self.left.pop(key)

    # --- at the end of a step, or where values are collected, on all ranks alike ----------------------

    def numbers_to_compare(self) -> tuple[int, int, int, int]:
        """Number of changed values, and digests of `numbers` and `tensors`, `left`, and `replaced`. The host waits for
        the device only if something was written."""
        if self.engine.invariants.compares_at_this_end:
            self._note_kept()
        for flat in self.engine.flats:  # here on all ranks, whenever each would have noticed it
            self.engine.absorb_edits(flat)
        carried_out = sorted((*key, number) for key, number in self.numbers.items())
        found = (_read(each) for each in (self.tensors, self.left, self.replaced))
        plain, left, replaced = (tuple(sorted((*key, digest) for key, digest in each.items())) for each in found)
        settings = (_digest_of_settings(groups) for _, _, groups in self.stepped)
        written = hash((*carried_out, *plain, *settings)) & BITS
        return self.engine.changes, written, hash(left) & BITS, hash(replaced) & BITS

    def compare(self, changes_alike: bool, carried_out_alike: bool, left_alike: bool, replaced_alike: bool) -> None:
        """Compare in detail what is not the same on all ranks, and start again.

        Raises:
            DesyncError: the ranks have written different values, or some have and others have not.
        """
        try:
            if not changes_alike:
                self.engine.invariants.refuse_edits()
            if not carried_out_alike:
                self._refuse()
            if not replaced_alike:
                self._compare_replaced()
            if not left_alike:
                self._compare_left()
        finally:
            self.clear()

    def compare_now(self) -> None:
        """The same where all ranks have just met, for values written since the last end of a step.

        Raises:
            DesyncError: the ranks have written different values.
        """
        self.compare(*self.engine.comm.agree(self.numbers_to_compare()))

    def _keys(self) -> list[_Key]:
        return [
            (kind, flat.index, i)
            for kind in (False, True)
            for flat in self.engine.flats
            for i in range(len(flat.names))
        ]

    def _refuse(self) -> None:
        keys, plain = self._keys(), _read(self.tensors)
        mine = [hash((key in plain, plain.get(key, 0), self.numbers.get(key, 0))) & BITS for key in keys]
        settings = [_digest_of_settings(groups) for _, _, groups in self.stepped]  # ranks meet before each step
        apart = differing(self.engine.comm, [*settings, *mine])
        if apart and apart[0] < len(settings):
            optimizer, name, values = self.stepped[apart[0]]
            raise DesyncError(
                f"The ranks have stepped with different learning rates or other settings ({optimizer}, "
                f"{name.replace('lr', 'learning rate')} {', '.join(map(str, values[:5]))} on rank "
                f"{self.engine.comm.rank}). Each would update its part of the parameters with its own. Code that sets "
                "them (ReduceLROnPlateau, your own schedule) must see the same number on all ranks: average a rank's "
                "own loss first (torch.distributed.all_reduce)."
            )
        raise self._error([keys[i - len(settings)] for i in apart])

    def _compare_replaced(self) -> None:
        keys, replaced = self._keys(), _read(self.replaced)
        mine = [replaced[key] & BITS if key in replaced else None for key in keys]
        ends = [[-BITS - 1 if number is None else sign * number for number in mine] for sign in (1, -1)]
        largest, smallest = self.engine.comm.largest(torch.tensor(ends, device=self.engine.comm.device)).tolist()
        apart = [
            key for key, most, least in zip(keys, largest, smallest, strict=True) if most not in (-least, -BITS - 1)
        ]
        if apart:
            raise self._error(apart)

    def _compare_left(self) -> None:
        engine, keys, left = self.engine, self._keys(), _read(self.left)
        mine = [left[key] & BITS if key in left else None for key in keys]
        apart = differing(engine.comm, [-1 if number is None else number for number in mine])
        flats = {flat.index: flat for flat in engine.flats}
        present = (int(_digest_of_left(_present(flats[keys[i][1]], keys[i][2]))) & BITS for i in apart)
        wrong = on_any_rank(engine.comm, [mine[i] not in (None, now) for i, now in zip(apart, present, strict=True)])
        if any(wrong):
            raise self._error([keys[i] for i, flag in zip(apart, wrong, strict=True) if flag], " in forward")
        if not engine.sharded or engine.comm.replicas > 1:
            engine.invariants.check_replicas([(flats[keys[i][1]], keys[i][2]) for i in apart])

    def _error(self, keys: list[_Key], elsewhere: str = "") -> DesyncError:
        names = {flat.index: flat.names for flat in self.engine.flats}
        gradients = all(gradient for gradient, _, _ in keys)
        given = [names[f][i] for gradient, f, i in keys if gradient == gradients]
        where = next((f", at {self.places[key]}" for key in keys if key in self.places), elsewhere)
        return DesyncError(
            f"{'the gradients of ' if gradients else ''}{some(given)}: the ranks have written different values"
            f"{where}. Each would keep its part of its own values. Average values from a rank's own batch over ranks "
            "first (torch.distributed.all_reduce); draw random ones with the same seed on all ranks, or broadcast "
            "them. Values that may differ between ranks belong in a buffer."
        )


def _present(flat: Flat, index: int) -> torch.Tensor:
    """The whole value, 1-D, as a gather would return it; all ranks are here. Adds bytes, as -0.0 would get lost."""
    first, last = flat.range_in_parameter(index)
    local = flat.at_work(flat.locals[index].detach().view(-1)).to(flat.dtype)
    whole = torch.zeros(flat.numels[index], dtype=flat.dtype, device=local.device)
    whole[first:last] = local
    if flat.engine.sharded:
        flat.engine.comm.total(whole.view(torch.uint8), of_shards=True)
    return whole
