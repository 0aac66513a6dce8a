"""What can be known of a teacher before models are loaded, and a teacher that a vLLM server is."""

from __future__ import annotations

from shardproof.errors import ConfigError
from shardproof.train.model.declared import declared
from shardproof.train.options.rlhf_config import RlhfConfig


def check_topk(config: RlhfConfig) -> None:
    """Raise ConfigError for more of a teacher's tokens than it has, or the model that learns from it."""
    for name in ("model", "teacher_model"):
        source = getattr(config, name)
        known = declared(config.model_copy(update={"model": source})) if source and config.gkd_logits_topk else None
        tokens = getattr(known and known.get_text_config(), "vocab_size", None)
        if tokens and config.gkd_logits_topk > tokens:  # type: ignore[operator]  # there is none without
            raise ConfigError(
                f"--gkd-logits-topk {config.gkd_logits_topk}: {source} knows {tokens} tokens. Leave it out to compare"
                " in all of them."
            )
