"""What a model's config tells before the model is loaded."""

from __future__ import annotations

from typing import Any

from shardproof.train.model.loading import TINY
from shardproof.train.options.config import RunConfig


def declared(config: RunConfig) -> Any:
    """The config of the model; None if transformers does not know it, as for a plugin's model."""
    from transformers import AutoConfig

    from shardproof.models.tiny import tiny_config

    if config.model == TINY:
        return tiny_config()
    try:
        return AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
    except Exception:
        return None


def check_shares_rows(config: RunConfig) -> None:
    """Check that processes can share rows of a model, as far as its config and class tell; the first step tests it too.

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
    # Models with sinks use document attention instead, which shows only once the model is built.
    knows_none = kind is not None and not kind._supports_sdpa and not kind._supports_flash_attn
    if knows_none and not config.external_plugins:
        check_attention_of(kind, "eager")
