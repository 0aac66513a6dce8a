"""The meaning of --loss for tasks with losses of their own."""

from __future__ import annotations

from shardproof.train.options.config import SftConfig

INFONCE, POINTWISE = "infonce", "pointwise"
_DEFAULTS = {"embedding": INFONCE, "reranker": POINTWISE, "generative_reranker": POINTWISE}  # by --task


def loss_of(config: SftConfig) -> str:
    """The loss named by --loss, whose default stands for the default of the task."""
    given, default = config.loss, SftConfig.model_fields["loss"].default
    return _DEFAULTS.get(config.task, given) if given == default else given
