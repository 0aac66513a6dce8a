"""Fine-tune language and omni models; the sharding stage is a switch, not a rewrite.

Importing this module is cheap: torch is imported when the first name is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardproof.errors import (
    ChangedInPlaceError,
    CheckpointError,
    ConfigError,
    DataError,
    DesyncError,
    DeviceError,
    EngineError,
    NonFiniteError,
    ShardproofError,
    StaleWeightsError,
)

__version__ = "0.1.0.dev0"

_ENGINE = (
    "MixedPrecision",
    "barrier",
    "clip_grad_norm_",
    "full_state_dict",
    "load_full_state_dict",
    "no_sync",
    "shard",
    "stats",
    "whole",
)

_PLUGINS = (
    "register_answer_metric",
    "register_callback",
    "register_loss",
    "register_metric",
    "register_model",
    "register_optimizer",
    "register_reward",
    "register_row_format",
)

_CHECKPOINT = {"save": "save", "load": "load", "newest_checkpoint": "newest"}  # public names, and those in the module

__all__ = [
    "ChangedInPlaceError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DesyncError",
    "DeviceError",
    "EngineError",
    "NonFiniteError",
    "ShardproofError",
    "StaleWeightsError",
    "__version__",
    *_CHECKPOINT,
    *_ENGINE,
    *_PLUGINS,
    "load_pretrained",
]

if TYPE_CHECKING:
    from shardproof.checkpoint.api import load, save
    from shardproof.checkpoint.api import newest as newest_checkpoint
    from shardproof.integrations.pretrained import load_pretrained
    from shardproof.plugins import (
        register_answer_metric,
        register_callback,
        register_loss,
        register_metric,
        register_model,
        register_optimizer,
        register_reward,
        register_row_format,
    )
    from shardproof.zero.api import (
        MixedPrecision,
        barrier,
        clip_grad_norm_,
        full_state_dict,
        load_full_state_dict,
        no_sync,
        shard,
        stats,
        whole,
    )


def __getattr__(name: str) -> Any:
    if name in _ENGINE:
        return getattr(importlib.import_module("shardproof.zero.api"), name)
    if name in _PLUGINS:
        return getattr(importlib.import_module("shardproof.plugins"), name)
    if name in _CHECKPOINT:
        return getattr(importlib.import_module("shardproof.checkpoint.api"), _CHECKPOINT[name])
    if name == "load_pretrained":
        return importlib.import_module("shardproof.integrations.pretrained").load_pretrained
    raise AttributeError(f"module 'shardproof' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
