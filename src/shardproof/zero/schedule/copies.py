"""Edits of whole tensors that the engine has handed out.

[Note: copies]
`p.grad[0].zero_()` writes to a view of the whole gradient, which was gathered for this view and lies in no shard. The
same holds for an entry of `model.state_dict()`, and for a view of a parameter whose gathered buffer has been dropped.
In one process such a write changes the model, so it must do so here. The engine remembers the tensors it has handed
out, at least until its next check and for as long as somebody holds them, and checks their version counters before it
next uses values or gradients. Each rank then takes over its slice of what was written; an edit that cannot be told from
other changes is refused.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from shardproof.errors import EngineError

if TYPE_CHECKING:
    from shardproof.zero.tensors.parameter import ShardedGradient, ShardedValue
    from shardproof.zero.units.flat import Flat


@dataclass
class _Copy:
    """A whole tensor that somebody may hold.

    Attributes:
        tensor: kept here at least until the next check: `p.grad[0].zero_()` drops it at once.
        version: its version counter when it was handed out.
        flat, indices: the parameters it holds: one, in its own shape, or all of a buffer.
        versions: those of the parameters at that time; for a gradient, the version of its flat's gradients.
        gradient: the gradient that it is a copy of, if it is not one of values.
    """

    tensor: torch.Tensor
    version: int
    flat: Flat
    indices: range
    versions: list[int]
    gradient: ShardedGradient | None = None

    @property
    def edited(self) -> bool:
        return self.tensor._version != self.version

    @property
    def held(self) -> bool:
        """Whether anybody else holds the tensor, or a view of it."""
        return sys.getrefcount(self.tensor) > 2 or _uses(self.tensor) > 1


class Copies:
    """The tensors that one engine has handed out.

    Attributes:
        values, gradients: whole tensors. `data`: results of `p.data`, by flat and parameter.
        entries: those of `values` that are the last state-dict entry of a parameter, by flat and parameter.
        given: tensors assigned to `p.grad`, by flat and parameter, with their version then and the parameter's name.
    """

    def __init__(self) -> None:
        self.values: list[_Copy] = []
        self.gradients: list[_Copy] = []
        self.entries: dict[tuple[int, int], weakref.ref[_Copy]] = {}
        self.data: dict[tuple[int, int], list[weakref.ref[ShardedValue]]] = {}
        self.given: dict[tuple[int, int], tuple[weakref.ref[torch.Tensor], int, str]] = {}

    def of_value(self, tensor: torch.Tensor, flat: Flat, index: int | None = None) -> torch.Tensor:
        """Note that `tensor` holds the value of parameter `index`, or (None) the whole buffer. Returns `tensor`."""
        if tensor.is_inference():  # has no version counter: edits of it are not seen
            return tensor
        indices = range(len(flat.names)) if index is None else range(index, index + 1)
        self.values.append(_Copy(tensor, tensor._version, flat, indices, _versions(flat, indices)))
        return tensor

    def of_entry(self, whole: torch.Tensor, flat: Flat, index: int) -> torch.Tensor:
        """Note that `whole` becomes an entry of a state dict. Returns it, or a view of an existing entry: entries of a
        tied parameter share memory, by which safetensors and `torch.save` recognise that it is to be written once."""
        known = self.entries.get((flat.index, index))
        copy = known() if known is not None else None
        if copy is not None and not copy.edited and _is_current(copy) and torch.equal(copy.tensor, whole):
            return copy.tensor.detach()
        entry = self.of_value(whole, flat, index)
        if not whole.is_inference():
            self.entries[flat.index, index] = weakref.ref(self.values[-1])
        return entry

    def of_dropped(self, flat: Flat) -> None:
        """Note that a gathered buffer is dropped, if somebody holds a view of it."""
        if flat.whole is not None and flat.whole is not flat.shard and _uses(flat.whole) > 1:
            self.of_value(flat.whole, flat)

    def of_data(self, value: ShardedValue) -> ShardedValue:
        """Note that somebody may hold `p.data`. Returns it."""
        place = value.flat.index, value.index
        self.data[place] = [ref for ref in self.data.get(place, ()) if ref() is not None] + [weakref.ref(value)]
        return value

    def forget(self, value: ShardedValue) -> None:
        """The value becomes a parameter of its own."""
        place = value.flat.index, value.index
        self.data[place] = [ref for ref in self.data.get(place, ()) if ref() is not value]

    def leave_data(self, flat: Flat, index: int) -> None:
        """`p.data = ...` gives a parameter another tensor: earlier results of `p.data` keep the previous values."""
        held = [value for ref in self.data.pop((flat.index, index), ()) if (value := ref()) is not None]
        if held:
            own = held[0].local.clone()
            for value in held:  # which see each other's edits
                value.own = own

    def of_gradient(self, whole: torch.Tensor, gradient: ShardedGradient) -> torch.Tensor:
        """Note that `whole` (1-D, not a view) is the whole of `gradient`. Returns it, or an existing copy that somebody
        holds: two views of a gradient must see each other's edits."""
        if whole.is_inference():
            return whole
        for copy in self.gradients:
            if copy.gradient is gradient and _is_current(copy) and torch.equal(copy.tensor, whole):
                return copy.tensor
        indices = range(gradient.index, gradient.index + 1)
        flat = gradient.flat
        self.gradients.append(_Copy(whole, whole._version, flat, indices, [flat.grad_version], gradient))
        return whole

    def note_given(self, flat: Flat, index: int, value: torch.Tensor | None) -> None:
        """`p.grad = value`. Not for views: a change of their version may be an edit of another part."""
        self.given.pop((flat.index, index), None)
        if type(value) is torch.Tensor and not value.is_inference() and not value._is_view():
            self.given[flat.index, index] = weakref.ref(value), value._version, flat.names[index]

    def refuse_late_edits(self) -> None:
        """`p.grad = t` copies the values of `t`; code that edits `t` afterwards would miss the gradient."""
        for ref, version, name in self.given.values():
            if (tensor := ref()) is not None and tensor._version != version:
                raise EngineError(
                    f"A tensor was assigned to the gradient of '{name}' and edited afterwards, but the gradient keeps "
                    "the values of then. Edit `p.grad` itself, or assign last."
                )

    def take_in(self) -> None:
        """Take over edits since the last check."""
        self.take_in_gradients()
        self.take_in_values()

    def take_in_gradients(self) -> None:
        """Take over edits of gradients since the last check.

        Raises:
            EngineError: a gradient has changed since the tensor was handed out.
        """
        if not self.gradients:
            return
        copies, self.gradients = self.gradients, []
        # Edits of a gradient from before a zero_grad no longer matter.
        edited = [c for c in copies if c.edited and cast("ShardedGradient", c.gradient).buffer is c.flat.grad]
        for copy in edited:
            if not _is_current(copy):
                raise _too_late(copy, "the gradient of ", "`p.grad[0].zero_()`")
        for copy in edited:
            _take_gradient(copy)
        self.gradients = [copy for copy in copies if copy.held]

    def take_in_values(self) -> None:
        """Take over edits of parameters since the last check.

        Raises:
            EngineError: a value was written to in two places, or has changed since the tensor was handed out.
        """
        if not self.values:
            return
        copies, self.values = self.values, []
        edited = [copy for copy in copies if copy.edited]
        for copy in edited:
            if any(_overlap(copy, other) for other in edited if other is not copy) or not _is_current(copy):
                raise _too_late(copy, "", "`p[0].zero_()`")
        for copy in edited:
            _take_value(copy)
        self.values = [copy for copy in copies if copy.held]


def _uses(tensor: torch.Tensor) -> int:
    """torch's own reference count of a tensor: one for Python, one for each view."""
    return tensor._use_count()  # type: ignore[attr-defined,no-any-return]


def _versions(flat: Flat, indices: range) -> list[int]:
    return [flat.versions[i] for i in indices]


def _overlap(one: _Copy, other: _Copy) -> bool:
    return one.flat is other.flat and bool(set(one.indices) & set(other.indices))


def _is_current(copy: _Copy) -> bool:
    """Whether the values have not been changed in any other way since."""
    flat = copy.flat
    if copy.gradient is not None:
        return copy.versions == [flat.grad_version]
    buffer = flat.whole if flat.whole is not flat.shard and flat.gathering is None else None
    return _versions(flat, copy.indices) == copy.versions and (buffer is None or buffer._version == flat.whole_edits)


def _too_late(copy: _Copy, of: str, example: str) -> EngineError:
    names = ", ".join(f"'{copy.flat.names[i]}'" for i in copy.indices[:5])
    return EngineError(
        f"{of}{names}: edited through a view, or an entry of state_dict(), that was taken before the value changed. "
        f"Take it anew for each edit ({example}), or edit inside shardproof.whole(model, writeback=True)."
    )


def _take_gradient(copy: _Copy) -> None:
    flat, index, gradient = copy.flat, copy.indices[0], cast("ShardedGradient", copy.gradient)
    copy.version = copy.tensor._version
    with torch.no_grad():
        flat.local_of(gradient.buffer, index).view(-1).copy_(flat.slice_of(copy.tensor, index))
    flat.engine.gradients.generation += 1
    flat.engine.written.note((True, flat.index, index), "view", [copy.tensor])


def _take_value(copy: _Copy) -> None:
    flat, tensor = copy.flat, copy.tensor
    one = len(copy.indices) == 1
    with torch.inference_mode(False), torch.no_grad():
        for i in copy.indices:
            whole = tensor if one and tensor.shape == flat.shapes[i] else flat.view(tensor, i)
            flat.take_over(i, whole)
            if one:
                flat.changed(i)
                flat.engine.written.note((False, flat.index, i), "view", [whole])
            else:
                flat.engine.written.note_left(flat, i, whole)
    if not one:
        flat.version += 1  # something in the buffer has changed, but it is not known which parameter
    copy.version, copy.versions = tensor._version, _versions(flat, copy.indices)
