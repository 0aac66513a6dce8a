"""What a model computes from rows, before and after packing."""

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

ROOM = 1.3  # the least memory a model needs on an accelerator, relative to its weights


@dataclass(frozen=True)
class Measured:
    """The results for some rows.

    Attributes:
        found: fp32; the loss of each labelled token, or the scores, label logits or vector of each row: [rows, size].
        of: what these are.
    """

    rows: int
    found: torch.Tensor
    of: Literal["tokens", "labels", "vectors"]

    @property
    def loss(self) -> float | None:
        """The mean loss over all labelled tokens, if there are any."""
        return float(self.found.mean()) if self.of == "tokens" else None

    def told(self, after: Measured) -> str:
        """The comparison of the two, for a message."""
        before, now = self.found, after.found
        if self.of == "tokens":
            moved = float((now - before).abs().mean())
            return f"loss {self.loss:.4f} before, {after.loss:.4f} after; per-token loss changes by {moved:.2g}"
        away = float((now - before).norm() / before.norm().clamp_min(1e-30))
        told = f"outputs change by {away:.2g} of their size"
        if self.of == "labels" and before.shape[1] > 1:
            same = int((before.argmax(1) == now.argmax(1)).sum())
            told += f"; {same:,} of {len(before):,} rows keep their label"
        return told


def measure(model: Any, batches: Batches, pooling: str = "last") -> Measured:
    """Run the model on the rows once, without gradients. `pooling`: how an embedding model turns a text into a
    vector."""
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
            elif out.logits.dim() == 3:  # logits over the vocabulary: those after the text score it
                found.append(out.logits[torch.arange(len(mask), device=mask.device), last_places(mask)].float())
            else:
                of = "labels"
                found.append(out.logits.float().reshape(len(mask), -1))
    return Measured(batches.drawn, torch.cat(found).cpu(), of)


@contextmanager
def at_work(model: Any) -> Iterator[torch.device]:
    """Keep the model in `eval` mode on the accelerator within this context, if there is one with room for it."""
    device, home = default_device(), next(model.parameters()).device
    if device.type != "cpu":
        size = sum(p.nbytes for p in model.parameters())
        if ROOM * size > free_memory(device, 1):
            log.warning("The model (%.3g GB) does not fit on %s, so it runs on the CPU.", size / 1e9, device)
            device = home
    was = model.training
    model.eval().to(device)
    try:
        yield device
    finally:
        model.train(was).to(home)
