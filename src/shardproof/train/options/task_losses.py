"""What --loss is where a task has losses of its own."""

from __future__ import annotations

from shardproof.train.options.config import SftConfig

INFONCE, POINTWISE = "infonce", "pointwise"
_DEFAULTS = {"embedding": INFONCE, "reranker": POINTWISE, "generative_reranker": POINTWISE}  # by --task


def loss_of(config: SftConfig) -> str:
    """Which loss: the one of --loss, whose default stands for that of the task."""
    given, default = config.loss, SftConfig.model_fields["loss"].default
    return _DEFAULTS.get(config.task, given) if given == default else given
