"""Rows padded on the right, like those that are scored or embedded."""

from __future__ import annotations

from typing import Any

import torch

from shardproof.errors import ConfigError
from shardproof.models.forward import tried, without_adapters


def check_padding(model: Any, ids: torch.Tensor, way: str) -> None:
    """Check that a row beside a longer one gets the same scores or hidden states as alone. Some models mix neighbouring
    tokens (FNet, Funnel, Canine), and XLNet scores the last position. Collective: every rank calls it.

    Args:
        ids: some tokens, of shape (length,).
        way: what a user can do about it.

    Raises:
        ConfigError: they differ.
    """
    length = len(ids)
    rows = torch.stack([torch.cat([ids, ids]), torch.cat([ids, torch.full_like(ids, _padding(model))])])
    mask = torch.ones_like(rows)
    mask[1, length:] = 0
    with tried(model):
        beside = _made(model, rows, mask)[1:]
        alone = _made(model, rows[1:, :length], mask[1:, :length])
    beside = beside if beside.shape == alone.shape else beside[:, :length]
    most = 1e-3 if alone.dtype == torch.float32 else 5e-2
    if float((beside - alone).abs().max()) > most * float(alone.abs().max()):
        raise ConfigError(
            f"{type(without_adapters(model)).__name__} treats a row beside a longer one differently than the row"
            f" alone: it does not ignore the padding after it. {way}"
        )


def _padding(model: Any) -> int:
    return model.config.get_text_config().pad_token_id or 0


def _made(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Scores of shape (rows, labels), or hidden states of shape (rows, length, width)."""
    made = model(input_ids=ids, attention_mask=mask)
    found: torch.Tensor = made.logits if hasattr(made, "logits") else made.last_hidden_state
    return found.detach()
