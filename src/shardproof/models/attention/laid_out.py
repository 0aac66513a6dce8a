"""A decoder's inputs and outputs for a padded batch, laid out as packed rows or as parts of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def laid_out(
    args: Any, given: dict[str, Any], rows: tuple[int, ...], places: Tensor, positions: Tensor, in_space: bool
) -> tuple[Any, dict[str, Any]]:
    """The arguments of a decoder (`args` and `given`) for padded rows, converted to packed rows.

    Args:
        rows: the number of padded rows, and their length.
        places: int64, (packed rows, longest): the index of each token in the concatenated padded rows; -1 is padding.
        positions: the positions of these tokens, which restart at each row.
        in_space: see `in_space`.
    """
    spread = given.get("position_ids")

    def put(value: Any) -> Any:
        return put_in_places(value, places) if is_per_token(value, rows) else value

    packed = {name: put(value) for name, value in given.items()}
    packed |= {"position_ids": positions, "attention_mask": None, **_of_marked(given, places)}
    axes: list[Tensor] = []
    if spread is not None and spread.ndim == 3:
        axes = [put(axis) for axis in spread[-3:]]
    elif spread is None and in_space:  # rows of text, whose positions the model leaves to the decoder
        axes = [positions] * 3
    if axes:  # in time, height and width, preceded by those that mark the ends of rows
        packed["position_ids"] = torch.stack([positions, *axes])
    return tuple(put(value) for value in args), packed


def change_tensors(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The output of a decoder, with `change` applied to each tensor in it."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, dict):  # as the outputs of transformers are
        for name, value in output.items():
            output[name] = change_tensors(value, change)
        return output
    return tuple(change_tensors(value, change) for value in output) if isinstance(output, tuple) else output


def _of_marked(given: dict[str, Any], places: Tensor) -> dict[str, Any]:
    """Arguments that cover only marked tokens (which Qwen3-VL adds to image tokens in its first layers), restricted to
    the tokens that are laid out."""
    marks, added = given.get("visual_pos_masks"), given.get("deepstack_visual_embeds")
    if marks is None or added is None:
        return {}
    numbers = put_in_places(marks.flatten().cumsum(0).mul(marks.flatten()).view(marks.shape), places)
    here = numbers[numbers.gt(0)] - 1
    return {"deepstack_visual_embeds": [of_layer[here] for of_layer in added]}


def is_per_token(value: Any, rows: tuple[int, ...]) -> bool:
    """Whether a value has an entry for each token of `rows` (number, length)."""
    return isinstance(value, Tensor) and tuple(value.shape[:2]) == rows


def in_space(model: Any) -> bool:
    """Whether the decoder takes three-dimensional positions. It expands others, and some decoders then no longer look
    for rows in them. The function that makes such positions has the same name throughout transformers."""
    return any(hasattr(type(part), "get_rope_index") for part in model.modules())


def put_in_places(value: Tensor, places: Tensor) -> Tensor:
    """Per-token values of padded rows (rows, length, ...) for packed rows (packed rows, longest, ...), padded with
    zeros."""
    nowhere = places.lt(0)
    found = value.flatten(0, 1)[places.clamp(min=0)]
    return found.masked_fill(nowhere.view(*nowhere.shape, *[1] * (value.ndim - 2)), 0)
