"""The callbacks of a run, chosen by its options."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers.trainer_callback import TrainerCallback

from shardproof.models.attention.padding_free import check_padding_free
from shardproof.plugins import load
from shardproof.train.collecting import LeavesOutWhatStays
from shardproof.train.model.few import few_tokens
from shardproof.train.model.loading import tokenizer_of
from shardproof.train.model.right_padding import check_padding
from shardproof.train.model.shared_rows import check_shared_rows
from shardproof.train.optim.in_turn import LayersInTurn
from shardproof.train.options.config import RunConfig
from shardproof.train.options.option import SWANLAB
from shardproof.train.stop import EndOfEpoch, JudgesEvaluations


def callbacks_of(config: RunConfig) -> list[TrainerCallback]:
    """The callbacks that this run needs, in the order in which they are called, followed by the user's own."""
    found: list[TrainerCallback] = [LeavesOutWhatStays()]
    if config.lisa_activated_layers:
        found.append(LayersInTurn(config.lisa_activated_layers, config.lisa_step_interval, config.seed))
    if config.padding_free:
        found.append(Tries(check_padding_free))
    if config.sequence_parallel > 1:
        found.append(Tries(check_shared_rows))
    if config.keep_best or config.early_stop:
        found.append(JudgesEvaluations(config.best_metric, config.early_stop))
    epochs = [strategy == "epoch" for strategy in (config.eval_strategy, config.save_strategy)]
    if getattr(config, "max_epochs", None):  # the last step is not known in advance
        epochs = [config.evaluates, config.writes_checkpoints]
    if any(epochs):
        found.append(EndOfEpoch(*epochs))
    if SWANLAB in config.report_to:
        from swanlab.integration.transformers import SwanLabCallback

        found.append(SwanLabCallback())
    plugins = load(config.external_plugins)
    return [*found, *(plugins.find("callback", name)() for name in config.callbacks)]


def tries_padding(prepared: Any, way: str) -> list[TrainerCallback]:
    """For models that score or embed texts: a check that each text gives the same result beside longer ones as alone.
    `way`: what a user can do instead."""
    text = prepared.processing is prepared.tokenizer
    return [Tries(partial(check_padding, way=way))] if text else []


class Tries(TrainerCallback):
    """Tests how a model treats rows on a few tokens before the first step, once it is on its training device."""

    def __init__(self, check: Callable[[Any, Any], None]) -> None:
        self.check = check

    def on_train_begin(self, *args: Any, model: Any, processing_class: Any, **more: Any) -> None:
        ids = few_tokens(tokenizer_of(processing_class))
        self.check(model, ids.to(next(model.parameters()).device))
