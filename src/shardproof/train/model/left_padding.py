"""Rows padded on the left, like the prompts that answers are generated for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import pad

from shardproof.errors import ConfigError
from shardproof.models.forward import tried, without_adapters
from shardproof.train.model.few import FEW

MASK = "attention_mask"


def count_from_first_tokens(model: Any, ids: torch.Tensor) -> None:
    """Make a model whose positions count padding (GPT-2) count from the first token of each row, as it does in
    generation. Whether a model sees padding is found out by running it. Collective: every rank calls it.

    Args:
        ids: some tokens [1, length].

    Raises:
        ConfigError: it sees padding even so.
    """
    if not _sees_padding(model, ids):
        return
    handle = None
    if _takes(model, "position_ids"):
        handle = model.register_forward_pre_hook(_counted, prepend=True, with_kwargs=True)
    if handle is None or _sees_padding(model, ids):
        raise ConfigError(
            f"{type(without_adapters(model)).__name__} does not ignore the padding before the shorter prompts of a"
            f" batch, so it would learn from answers other than those it gives. Use another model, or an algorithm"
            f" that reads its answers from the dataset (dpo, kto, orpo, simpo, cpo)."
        )


def reads_padding(model: Any, ids: torch.Tensor) -> bool:
    """Whether a generating model reads the padding before its rows (recurrent models do), even though generate() tells
    it what is padding and where rows begin. Any rank may call it, when ranks generate answers.

    Args:
        ids: some tokens [1, length].
    """
    told_of_padding = _takes(model, MASK) or any(p.kind is p.VAR_KEYWORD for p in _parameters(model).values())
    return not told_of_padding or _differs(model, ids, counted=_takes(model, "position_ids"))


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(type(without_adapters(model)).forward).parameters


def _takes(model: Any, name: str) -> bool:
    return name in _parameters(model)


def _sees_padding(model: Any, ids: torch.Tensor) -> bool:
    with tried(model):
        return _differs(model, ids)


def _differs(model: Any, ids: torch.Tensor, counted: bool = False) -> bool:
    mask = torch.ones_like(ids)
    padded = torch.cat([ids[:, :1].expand(-1, FEW), ids], dim=1)
    given = {"input_ids": padded, MASK: pad(mask, (FEW, 0))}
    if counted:
        given = _counted(model, (), given)[1]
    alone = model(input_ids=ids, attention_mask=mask).logits.detach()
    behind = model(**given).logits.detach()
    apart = (behind[:, FEW:].float() - alone.float()).abs().max()
    # Rotary positions round differently further along; other positions change a logit by about its own size.
    return float(apart) > float(alone.abs().max()) * (1e-2 if alone.dtype.itemsize >= 4 else 0.2)


def _counted(module: Any, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    ids, mask = inputs.get("input_ids"), inputs.get(MASK)
    if inputs.get("position_ids") is None and ids is not None and mask is not None and ids.shape == mask.shape:
        inputs = {**inputs, "position_ids": (mask.long().cumsum(dim=-1) - 1).clamp(min=0)}
    return args, inputs
