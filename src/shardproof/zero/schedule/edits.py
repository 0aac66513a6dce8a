"""Edits between steps, for which ranks wait for each other, and inside forward, where plain tensors stand in for
parameters: they are edits of the parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardproof.errors import EngineError
from shardproof.zero.autograd import SHOWN_BY, in_backward
from shardproof.zero.ranks.consensus import EDIT

if TYPE_CHECKING:
    from shardproof.zero.schedule.engine import Engine
    from shardproof.zero.units.flat import Flat

PIECE, PIECE_QUEUED = 2**18, 2**24  # elements, on a processor and on an accelerator


class Edits:
    """Edits outside of forward and backward. Until all ranks are about to make one, a rank may still compute with the
    values of before (one that validates alone), as before an update. They meet once for edits of many parameters in a
    row: the second edit of one begins the next row.

    Attributes:
        met: whether they have met since the last update.
        made: what was edited since they met, by index of flat and in it.
        waiting: the parameter that this rank is about to edit, or None.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.met, self.made = False, set[tuple[int, int]]()
        self.waiting: tuple[Flat, int] | None = None

    @property
    def _between_passes(self) -> bool:
        return self.engine.sharded and not self.engine.root.depth and not in_backward()

    def begin(self, flat: Flat, index: int) -> None:
        """This rank is about to edit a parameter."""
        in_a_row = self.met and (flat.index, index) not in self.made
        if self._between_passes and not in_a_row:
            self.meet(flat, index)
            self.met = True
            self.made.clear()

    def end(self, flat: Flat, index: int) -> None:
        """It has."""
        if self._between_passes:
            self.made.add((flat.index, index))

    def meet(self, flat: Flat, index: int, the_same: bool = False) -> None:
        """Wait until all ranks are about to edit a parameter: any, or `the_same`."""
        self.waiting = flat, index
        self.engine.meet(EDIT, (flat.index, index) if the_same else None)
        self.waiting = None

    def refuse(self) -> None:
        """Some ranks are editing, and others wait for something else: all of them name the parameter."""
        places = [(flat, index) for flat in self.engine.flats for index in range(len(flat.names))]
        comm = self.engine.comm
        place = torch.tensor([-1 if self.waiting is None else places.index(self.waiting)], device=comm.device)
        flat, index = places[int(comm.largest(place))]
        self.engine.invariants.refuse_edits([flat.names[index]])


def keep_edits(flat: Flat, look: bool) -> None:
    """Apply edits that a forward made to the plain tensors to the parameters that these stood in for.

    torch counts edits of a tensor and of its views, but not those through `.data` (`p.data.mul_()`), so these have to
    be searched for: `look` says to compare values in this pass, and parameters found once are compared in every pass. A
    change of the parameter itself meanwhile (a step in the middle of forward) stays.

    Raises:
        EngineError: data of another shape was assigned, or the parameter's own in another order; a parameter was
            unfrozen.
        RuntimeError: as torch does, of an edit that autograd has seen.
    """
    if look and flat.fresh:
        flat.edited |= _edited_unseen(flat)
    if not flat.edited and _as_shown(flat):
        return
    flat.standing.show_anew()
    for index, view in enumerate(flat.open_views or ()):
        _check_graph(flat.names[index], view)
        assigned = view.data_ptr() != flat.open_at[index]  # p.data = ...
        another = not view.is_contiguous() or view.numel() != flat.numels[index]  # p.data = p.data.t()
        seen = view._version != flat.open_versions[index] or index in flat.edited
        if not (assigned or another) and (not seen or flat.versions[index] != flat.open_changes[index]):
            continue
        whole = flat.view(flat.gathered, index).data
        if view.shape != whole.shape or (another and not assigned):
            what = "a view of itself" if view.shape == whole.shape else f"data of shape {tuple(view.shape)}"
            raise EngineError(
                f"'{flat.names[index]}' has shape {tuple(whole.shape)} and was assigned {what} in forward. Assign "
                "values of this shape (`.clone()`), or change it before `shardproof.shard`."
            )
        if assigned:
            whole.copy_(view.detach())
        flat.take_over(index, whole)
        flat.engine.written.note_left(flat, index, whole)


def _as_shown(flat: Flat) -> bool:
    """Whether a forward left its plain tensors as they were, as far as torch can tell. Runs in every forward, so it
    looks at all views at once."""
    views = flat.open_views or []
    return (
        [view._version for view in views] == flat.open_versions
        and [view.data_ptr() for view in views] == flat.open_at
        and all(view.is_contiguous() for view in views)
        and [view.shape for view in views] == flat.shapes
        and [view.requires_grad for view in views] == flat.requires_grad
    )


def _check_graph(name: str, view: torch.Tensor) -> None:
    """Refuse changes that would be lost, because they were made to the plain tensor instead of the parameter."""
    if not view.requires_grad or isinstance(view.grad_fn, SHOWN_BY):
        return
    if view.grad_fn is None:
        raise EngineError(
            f"'{name}' was unfrozen in the forward of its own module, which has begun without its gradient. Call "
            "requires_grad_(True) before the forward."
        )
    raise RuntimeError(
        f"a leaf Variable that requires grad is being used in an in-place operation: parameter '{name}', in forward. "
        "Wrap the edit in torch.no_grad()."
    )


def _edited_unseen(flat: Flat) -> set[int]:
    """Parameters whose gathered values differ from those that this rank sent, within its slices."""
    if flat.whole is None or flat.whole.is_meta or flat.whole is flat.shard or flat.kept is not None:  # one memory
        return set()
    part, sent = flat.part_of(flat.whole), flat.sent
    if _same(flat, part, sent):
        return set()
    pairs = enumerate(zip(flat.locals_of(part), flat.locals_of(sent), strict=True))
    return {index for index, (now, then) in pairs if not _same(flat, now, then)}


def _same(flat: Flat, gathered: torch.Tensor, sent: torch.Tensor) -> bool:
    """Compare piece by piece: a copy of the whole shard may not fit. The host asks an accelerator only once."""
    here = flat.engine.pool.keeps  # buffers are kept: only on CPUs
    piece = PIECE if here else PIECE_QUEUED
    pieces = zip(gathered.view(-1).split(piece), sent.view(-1).split(piece), strict=True)
    pairs = ((now, flat.at_work(then).to(flat.dtype)) for now, then in pieces)
    if here:
        return all(torch.equal(*pair) for pair in pairs)
    differ = [torch.ne(*pair).any() for pair in pairs]
    return not differ or not bool(torch.stack(differ).any())
