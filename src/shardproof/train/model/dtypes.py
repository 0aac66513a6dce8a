"""The dtype in which a run writes weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardproof.train.model.loading import TINY
from shardproof.train.options.config import RunConfig


def saved_dtype(config: RunConfig, source: str) -> Any:
    """The dtype that --dtype means for the model in a folder or on the hub; None if it is that of the master
    weights."""
    import torch

    found = asked_dtype(config)
    if config.dtype == "auto" and config.tuner == "full" and source != TINY:  # adapters may be merged into any dtype
        found = getattr(torch, own_dtype(source), None)
    return found if found in (torch.bfloat16, torch.float16) else None


def asked_dtype(config: RunConfig) -> Any:
    """The dtype that --dtype names; None if it is left to the model."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}.get(config.dtype)


def own_dtype(source: str) -> str:
    """The torch name of the dtype of a model's files, from its config; float32 if the config does not say."""
    from shardproof.models.loading.processors import said_by

    return next(_named(said_by(source, "config.json")), "float32")


def _named(config: dict[str, Any]) -> Iterator[str]:
    """Dtypes that a config names, for the model or for its parts."""
    yield from (str(config[name]) for name in ("dtype", "torch_dtype") if config.get(name))
    for part in config.values():
        if isinstance(part, dict):
            yield from _named(part)
