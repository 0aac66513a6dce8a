"""Which activations are recomputed in backward, as values of sft's option."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import TYPE_CHECKING, Any

from shardproof.models.checkpointing import checkpointing_name, enable_checkpointing

if TYPE_CHECKING:
    from shardproof.doctor.config import PlanConfig

Checkpointing = bool | int | str  # False, True, "selective", or every n-th layer


def checkpointing_of(words: Sequence[Checkpointing]) -> list[Checkpointing]:
    """The kinds that are meant, each once, False first: once turned on, checkpointing stays on."""
    meant: dict[Checkpointing, list[Checkpointing]] = {"no": [False], "yes": [True], "both": [False, True]}
    found = {again for word in words for again in meant.get(word, [word])}
    return sorted(
        (bool(again) if again in (0, 1) else again for again in found), key=lambda again: (again != 0, str(again))
    )


def period_of(again: Checkpointing, period: int) -> int:
    """The period with which blocks repeat if every n-th is recomputed; `period`: the period without that."""
    return lcm(period, again) if isinstance(again, int) and again > 1 else period


def checkpoint(model: Any, again: Checkpointing, config: PlanConfig) -> None:
    """Make the model recompute activations, if asked for, as the recipes do."""
    from shardproof.train.model.activations import choose_checkpointing

    if not again:
        return
    model.__dict__.pop(f"{checkpointing_name(model)}_enable", None)  # left by the previous kind
    enable_checkpointing(choose_checkpointing(model, again), config.checkpointing_reentrant)
    if config.tuner != "full" or config.new_blocks:
        model.enable_input_require_grads()
