"""What a model computes of rows, before it is packed and after."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardproof.data.encoding.beside import told_of
from shardproof.zero.device import default_device, free_memory

if TYPE_CHECKING:
    from shardproof.train.packing.rows import Batches

log = logging.getLogger("shardproof")

ROOM = 1.3  # what a model takes on an accelerator beside its weights, at least


@dataclass(frozen=True)
class Measured:
    """What rows gave.

    Attributes:
        loss: the mean of all tokens that are learnt; None where rows have none.
        found: otherwise of each row its scores, labels' logits or vector: [rows, size], fp32.
        labels: whether the largest of these is the label of its row.
    """

    rows: int
    loss: float | None
    found: torch.Tensor | None = None
    labels: bool = False

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) if self.loss is not None else bool(self.found.isfinite().all())  # type: ignore[union-attr]

    def told(self, after: Measured) -> str:
        """What a user is told of the two."""
        if self.loss is not None and after.loss is not None:
            return f"loss {self.loss:.4f} before, {after.loss:.4f} after"
        before, now = self.found, after.found
        if before is None or now is None:
            return ""
        away = float((now - before).norm() / before.norm().clamp_min(1e-30))
        told = f"what it gives is {away:.2g} of its size away from what it gave"
        if self.labels and before.shape[1] > 1:
            same = int((before.argmax(1) == now.argmax(1)).sum())
            told += f"; {same:,} of {len(before):,} rows get the label that they got"
        return told


def measure(model: Any, batches: Batches) -> Measured:
    """Go through the rows once, without gradients."""
    total, tokens, found, labels = 0.0, 0, [], False
    with torch.no_grad(), at_work(model) as device:
        for batch in told_of(batches.on(device), len(batches)):
            out = model(**batch)
            if batches.learns:
                learnt = int((batch["labels"][:, 1:] != -100).sum())
                total, tokens = total + float(out.loss) * learnt, tokens + learnt
            else:
                value = out.logits if hasattr(out, "logits") else out.last_hidden_state[:, -1]
                labels = hasattr(out, "logits")
                found.append(value.float().reshape(1, -1).cpu())
    if batches.learns:
        return Measured(len(batches), total / max(tokens, 1))
    return Measured(len(batches), None, torch.cat(found), labels)


@contextmanager
def at_work(model: Any) -> Iterator[torch.device]:
    """Have the model on the accelerator for a while, in `eval`, where there is one with room for it."""
    device, home = default_device(), next(model.parameters()).device
    if device.type != "cpu":
        size = sum(p.nbytes for p in model.parameters())
        if ROOM * size > free_memory(device, 1):
            log.warning("The model (%.3g GB) has no room on %s, and computes on the CPU.", size / 1e9, device)
            device = home
    was = model.training
    model.eval().to(device)
    try:
        yield device
    finally:
        model.train(was).to(home)
