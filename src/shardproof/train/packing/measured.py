"""What a model computes of rows, before it is packed and after."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F

from shardproof.data.encoding.beside import told_of
from shardproof.data.encoding.encode import IGNORE
from shardproof.models.scorers import last_places
from shardproof.train.embedding.pooling import pooled
from shardproof.zero.device import default_device, free_memory

if TYPE_CHECKING:
    from shardproof.train.packing.rows import Batches

log = logging.getLogger("shardproof")

ROOM = 1.3  # what a model takes on an accelerator beside its weights, at least


@dataclass(frozen=True)
class Measured:
    """What rows gave.

    Attributes:
        found: fp32; the loss of each token that is learnt, or of each row its scores, labels' logits or vector: [rows,
            size].
        of: what that is.
    """

    rows: int
    found: torch.Tensor
    of: Literal["tokens", "labels", "vectors"]

    @property
    def loss(self) -> float | None:
        """The mean of all tokens that are learnt, if any are."""
        return float(self.found.mean()) if self.of == "tokens" else None

    def told(self, after: Measured) -> str:
        """What a user is told of the two."""
        before, now = self.found, after.found
        if self.of == "tokens":
            moved = float((now - before).abs().mean())
            return f"loss {self.loss:.4f} before, {after.loss:.4f} after; that of a token moves by {moved:.2g}"
        away = float((now - before).norm() / before.norm().clamp_min(1e-30))
        told = f"what it gives is {away:.2g} of its size away from what it gave"
        if self.of == "labels" and before.shape[1] > 1:
            same = int((before.argmax(1) == now.argmax(1)).sum())
            told += f"; {same:,} of {len(before):,} rows get the label that they got"
        return told


def measure(model: Any, batches: Batches, pooling: str = "last") -> Measured:
    """Go through the rows once, without gradients. `pooling`: how a model that gives vectors makes them of a text."""
    found: list[torch.Tensor] = []
    of: Literal["tokens", "labels", "vectors"] = "tokens" if batches.learns else "vectors"
    with torch.no_grad(), at_work(model) as device:
        for batch in told_of(batches.on(device), len(batches), "measuring rows"):
            labels = batch.pop("labels", None)
            out = model(**batch)
            if labels is not None:
                learnt = labels[:, 1:] != IGNORE
                found.append(
                    F.cross_entropy(out.logits[:, :-1][learnt].float(), labels[:, 1:][learnt], reduction="none")
                )
                continue
            mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
            if not hasattr(out, "logits"):
                found.append(pooled(out.last_hidden_state, mask, pooling))
            elif out.logits.dim() == 3:  # of words, of which the one behind a text judges it
                found.append(out.logits[torch.arange(len(mask), device=mask.device), last_places(mask)].float())
            else:
                of = "labels"
                found.append(out.logits.float().reshape(len(mask), -1))
    return Measured(batches.drawn, torch.cat(found).cpu(), of)


@contextmanager
def at_work(model: Any) -> Iterator[torch.device]:
    """Have the model on the accelerator for a while, in `eval`, where there is one with room for it."""
    device, home = default_device(), next(model.parameters()).device
    if device.type != "cpu":
        size = sum(p.nbytes for p in model.parameters())
        if ROOM * size > free_memory(device, 1):
            log.warning("The model (%.3g GB) does not fit on %s, and runs on the CPU.", size / 1e9, device)
            device = home
    was = model.training
    model.eval().to(device)
    try:
        yield device
    finally:
        model.train(was).to(home)
