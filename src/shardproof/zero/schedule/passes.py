"""Gradients with `deterministic`: added pass by pass, in one order for any number of ranks.

[Note: one order of additions]
Floating-point sums depend on their order. Ranks first add up their own micro-batches, then each other's, so two ranks
and four differ in last bits. With `deterministic` the gradient of each backward pass is a term of its own. At the end
of a pass all ranks meet, exchange their terms instead of adding them, and add them one by one, in the order of the
ranks. As micro-batch j of rank r is number j * ranks + r of the step, that order is the same for any number of ranks.

Where ranks differ: a unit that some have used in this pass is exchanged by all, the others giving zeros, which change
no sum; and a rank that has no more passes takes part in those of others from whatever meeting it has come to. So pass j
meets pass j. Words for each reduction (ranks/consensus.py) would find ranks together, too, but pair the first use of a
unit on one rank with the first on another, which may be of another pass.

It costs a meeting for each pass and as many reductions as there are passes, and whole gradients during a pass. Norms
are those of whole gradients (norms.py).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from shardproof.zero.ranks.consensus import DECLARE, PASS

if TYPE_CHECKING:
    from shardproof.zero.comm.pending import Pending
    from shardproof.zero.schedule.gradients import Gradients
    from shardproof.zero.units.flat import Flat


def end_pass(gradients: Gradients) -> None:
    """A backward pass of this rank is through."""
    gradients.engine.meet(PASS)
    add_pass(gradients, mine=True)


def add_pass(gradients: Gradients, mine: bool) -> None:
    """All ranks are here: add the terms of those whose pass is through, as it is on this rank, or not (`mine`)."""
    engine = gradients.engine
    under_way: deque[tuple[Flat, Pending]] = deque()
    with torch.inference_mode(False), torch.no_grad():
        terms = {f.index: f.take_partial() for f in engine.flats if mine and f.partial is not None}
        for flat in _used(gradients, terms):
            if engine.comm.size == 1:
                flat.add_gradient(terms.pop(flat.index))
                continue
            term = terms.pop(flat.index, None)
            if term is not None:
                engine.note_use(flat, 2 * flat.index + 1)
                engine.count_reduction(flat, term.nbytes)
            under_way.append((flat, gradients.start(flat, term)))
            if len(under_way) > 1:  # one beside the one that is added: more would hold more whole buffers
                _add(gradients, *under_way.popleft())
        for flat, pending in under_way:
            _add(gradients, flat, pending)


def _used(gradients: Gradients, terms: dict[int, torch.Tensor]) -> list[Flat]:
    """What any rank has a term of."""
    engine = gradients.engine
    flags = torch.tensor([flat.index in terms for flat in engine.flats], device="cpu").long()
    same = engine.comm.agree(flags.tolist(), flags)
    used = [flat for flat, flag in zip(engine.flats, flags.tolist(), strict=True) if flag]
    if not (engine.adaptive or all(same)):
        names = ", ".join(f"'{flat.unit.name}'" for flat, alike in zip(engine.flats, same, strict=True) if not alike)
        raise engine.streams.refusal(
            f"Not every rank has gradients of {names} at the end of a backward pass. {DECLARE}"
        )
    return used


def _add(gradients: Gradients, flat: Flat, pending: Pending) -> None:
    """Add the terms of all ranks, one after the other."""
    terms = gradients.engine.wait(pending, 2 * flat.index + 1).unbind()
    if gradients.dirty:
        gradients.take_lent(flat)
        for term in terms:
            flat.add_gradient(term.clone() if flat.grad is None else term)
    else:
        gradients.keep_lent(flat, terms)
