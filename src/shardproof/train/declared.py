"""What the config of a model says before the model is there."""

from __future__ import annotations

from typing import Any

from shardproof.train.config import RunConfig
from shardproof.train.models import TINY


def declared(config: RunConfig) -> Any:
    """The config of the model; None where transformers does not know it: it is of a plugin's."""
    from transformers import AutoConfig

    from shardproof.models.tiny import tiny_config

    if config.model == TINY:
        return tiny_config()
    try:
        return AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
    except Exception:
        return None


def check_shared_heads(config: RunConfig) -> None:
    """See that processes can share rows of a model whose config says how many heads it has; any other one is tried at
    the first step.

    Raises:
        ConfigError: they cannot.
    """
    from shardproof.parallel.sequence import check_heads_of

    found = declared(config)
    if found is not None:
        check_heads_of(found, config.sequence_parallel)
