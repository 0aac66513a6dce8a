"""LISA (arXiv 2403.17919): of the language model's layers some are trained at a time, others every so many steps."""

from __future__ import annotations

import random
from typing import Any

from transformers.trainer_callback import TrainerCallback

from shardproof.errors import ConfigError
from shardproof.models.families.anatomy import language_layers


def check_layers(model: Any, some: int) -> None:
    """Raise ConfigError where a model has no layers of which so many would be some, without those that are frozen."""
    if some >= (there := len(_trained(model))):
        raise ConfigError(
            f"--lisa-activated-layers {some}: the language model of {type(model).__name__} has {there} layer(s) to"
            " train. Use fewer, or leave it out to train all of them."
        )


def _trained(model: Any) -> list[list[Any]]:
    """What is trained of each layer of which anything is."""
    layers = ([p for p in layer.parameters() if p.requires_grad] for _, layer in language_layers(model))
    return [parameters for parameters in layers if parameters]


class LayersInTurn(TrainerCallback):
    """Has `some` layers trained, drawn anew each `interval` steps, the same on every rank and in a run that goes on.

    What is beside the layers (embedding, head, norm) is always trained. A layer that is not has no gradient, and the
    optimizer leaves it alone; what it knows of it is still there when its turn comes again.
    """

    def __init__(self, some: int, interval: int, seed: int) -> None:
        self.some, self.interval, self.seed = some, interval, seed
        self._layers: list[list[Any]] = []
        self._turn = -1

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **more: Any) -> None:
        if not self._layers:  # what is frozen otherwise stays so
            self._layers = _trained(model)
        turn = state.global_step // self.interval
        if turn == self._turn:
            return
        self._turn = turn
        chosen = random.Random(f"{self.seed} {turn}").sample(range(len(self._layers)), self.some)
        for at, parameters in enumerate(self._layers):
            for p in parameters:
                p.requires_grad_(at in chosen)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        for parameters in self._layers:
            for p in parameters:
                p.requires_grad_(True)
