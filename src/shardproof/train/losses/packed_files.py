"""Rows with files, several in one: the model reads its files as ever, and its decoder runs on packed rows.

What a file becomes has its place among the tokens of a padded batch, and so have positions in three dimensions. So the
model makes the embeddings of a padded batch, which costs little, and they are packed where they enter the decoder, in
which nearly all of the work is done. Where its rows begin the decoder is told by positions, as that of a model of text.
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
    """The decoder of the model runs on packed rows, if the batch says where their tokens stand."""
    if PLACES[0] not in inputs:
        yield
        return
    places, positions = (inputs[name] for name in PLACES)
    rows, axes = tuple(inputs["input_ids"].shape), in_space(model)

    def enter(module: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        return laid_out(args, given, rows, places, positions, axes)

    # Before all others: what tells layers of documents (models/attention/recurrent.py) looks at packed rows.
    handle = model.get_decoder().register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        handle.remove()


def packed_labels(inputs: dict[str, Any], name: str = "labels") -> torch.Tensor:
    """The labels of the batch, or what else there is of tokens under this name, as they stand in its packed rows: what
    stands before a row's first token is another's. Padding is at position 0, as such tokens are."""
    labels: torch.Tensor = inputs[name]
    if PLACES[0] not in inputs:
        return labels
    places, positions = (inputs[of] for of in PLACES)
    return put_in_places(labels, places).masked_fill(positions.eq(0), IGNORE)
