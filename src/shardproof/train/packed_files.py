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

from shardproof.data.encode import IGNORE

PLACES = ("packed_places", "packed_positions")


@contextmanager
def packed(model: Any, inputs: dict[str, Any]) -> Iterator[None]:
    """The decoder of the model runs on packed rows, if the batch says where their tokens stand."""
    if PLACES[0] not in inputs:
        yield
        return
    places, positions = (inputs[name] for name in PLACES)
    rows = tuple(inputs["input_ids"].shape)

    def put(value: Any) -> Any:
        per_token = isinstance(value, torch.Tensor) and tuple(value.shape[:2]) == rows
        return put_in_places(value, places) if per_token else value

    def enter(module: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        spread = given.get("position_ids")
        packed = {name: put(value) for name, value in given.items()}
        packed |= {"position_ids": positions, "attention_mask": None}
        axes: list[Any] = []
        if spread is not None and spread.ndim == 3:
            axes = [put(axis) for axis in spread[-3:]]
        elif spread is None and _in_space(model):  # rows of text, which it leaves to the decoder to number
            axes = [positions] * 3
        if axes:  # in time, height and width; before them those by which rows end
            packed["position_ids"] = torch.stack([positions, *axes])
        return args, packed

    # Before all others: what tells layers of documents (models/recurrent.py) looks at packed rows.
    handle = model.get_decoder().register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        handle.remove()


def _in_space(model: nn.Module) -> bool:
    """Whether the decoder takes positions in three dimensions. Given others it spreads them, and some no longer look
    for rows in them then. What makes such positions has this name in all of transformers."""
    return any(hasattr(type(part), "get_rope_index") for part in model.modules())


def put_in_places(value: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """What there is of each token of padded rows (rows, length, ...), for packed rows (packed rows, longest, ...).
    Their padding is zeros."""
    nowhere = places.lt(0)
    found = value.flatten(0, 1)[places.clamp(min=0)]
    return found.masked_fill(nowhere.view(*nowhere.shape, *[1] * (value.ndim - 2)), 0)


def packed_labels(inputs: dict[str, Any]) -> torch.Tensor:
    """The labels of the batch as they stand in its packed rows: what stands before a row's first token is another's.
    Padding is at position 0, as such tokens are."""
    labels: torch.Tensor = inputs["labels"]
    if PLACES[0] not in inputs:
        return labels
    places, positions = (inputs[name] for name in PLACES)
    return put_in_places(labels, places).masked_fill(positions.eq(0), IGNORE)
