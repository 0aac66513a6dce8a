"""What the config of a model says before the model is there."""

from __future__ import annotations

from typing import Any

from shardproof.train.model.loading import TINY
from shardproof.train.options.config import RunConfig


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


def check_shares_rows(config: RunConfig) -> None:
    """See that processes can share rows of a model, as far as its config and its class tell; it is tried at the first
    step, too.

    Raises:
        ConfigError: they cannot.
    """
    from transformers import AutoModelForCausalLM

    from shardproof.parallel.sequence import check_attention_of, check_heads_of

    found = declared(config)
    if found is None:
        return
    check_heads_of(found, config.sequence_parallel)
    kind = AutoModelForCausalLM._model_mapping.get(type(found), None)
    # With sinks it is that of documents, which a model of that class shows when it is made.
    knows_none = kind is not None and not kind._supports_sdpa and not kind._supports_flash_attn
    if knows_none and not config.external_plugins:
        check_attention_of(kind, "eager")
