"""LISA (arXiv 2403.17919): only some layers of the language model are trained at a time, and they change regularly."""

from __future__ import annotations

import random
from typing import Any

from transformers.trainer_callback import TrainerCallback

from shardproof.errors import ConfigError
from shardproof.models.families.anatomy import language_layers


def check_layers(model: Any, some: int) -> None:
    """Raise ConfigError unless a model has more than `some` layers that are not frozen."""
    if some >= (there := len(_trained(model))):
        raise ConfigError(
            f"--lisa-activated-layers {some}: the language model of {type(model).__name__} has {there} layer(s) to"
            " train. Use fewer, or leave it out to train all of them."
        )


def _trained(model: Any) -> list[list[Any]]:
    """The trainable parameters of each layer that has any."""
    layers = ([p for p in layer.parameters() if p.requires_grad] for _, layer in language_layers(model))
    return [parameters for parameters in layers if parameters]


class LayersInTurn(TrainerCallback):
    """Trains `some` layers, redrawn every `interval` steps: the same on every rank and in a resumed run.

    Everything outside the layers (embedding, head, norm) is always trained. Other layers have no gradients, so the
    optimizer skips them, and keeps their state until they are drawn again.
    """

    def __init__(self, some: int, interval: int, seed: int) -> None:
        self.some, self.interval, self.seed = some, interval, seed
        self._layers: list[list[Any]] = []
        self._turn = -1

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **more: Any) -> None:
        if not self._layers:  # parameters frozen by other options stay frozen
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
