"""Packed rows with files: the model processes its files as usual, and its decoder runs on packed rows.

The embeddings of files and positions in three dimensions belong to places in a padded batch. So the model computes the
embeddings of a padded batch, which costs little, and they are packed as they enter the decoder, which does nearly all
of the work. Positions tell the decoder where rows begin, as in a text model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardproof.data.encoding.encode import IGNORE
from shardproof.models.attention.laid_out import in_space, laid_out, put_in_places

PLACES = ("packed_places", "packed_positions")


@contextmanager
def packed_files(model: Any, inputs: dict[str, Any]) -> Iterator[None]:
    """Run the decoder of the model on packed rows, if the batch says where their tokens go."""
    if PLACES[0] not in inputs:
        yield
        return
    places, positions = (inputs[name] for name in PLACES)
    rows, axes = tuple(inputs["input_ids"].shape), in_space(model)

    def enter(module: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        return laid_out(args, given, rows, places, positions, axes)

    # Before all other hooks: the one that marks documents for layers (models/attention/recurrent.py) needs packed rows.
    handle = model.get_decoder().register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        handle.remove()


def packed_labels(inputs: dict[str, Any], name: str = "labels") -> torch.Tensor:
    """The labels of the batch, or another per-token tensor of this name, as laid out in its packed rows. The first
    token of each row is ignored, as the token before it belongs to another row. So is padding, which is also at
    position 0."""
    labels: torch.Tensor = inputs[name]
    if PLACES[0] not in inputs:
        return labels
    places, positions = (inputs[of] for of in PLACES)
    return put_in_places(labels, places).masked_fill(positions.eq(0), IGNORE)
