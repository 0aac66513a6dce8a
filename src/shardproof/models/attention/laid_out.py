"""What a decoder is given of a padded batch, laid out for packed rows or for parts of rows, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def laid_out(
    args: Any, given: dict[str, Any], rows: tuple[int, ...], places: Tensor, positions: Tensor, in_space: bool
) -> tuple[Any, dict[str, Any]]:
    """What a decoder is given of packed rows, instead of what it is given of padded ones, in `args` and by name.

    Args:
        rows: how many there are, and their length.
        places: int64, of shape (packed rows, longest): where the tokens stand if padded rows are laid end to end, -1
            for padding.
        positions: of these tokens: they begin anew where a row does.
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
    elif spread is None and in_space:  # rows of text, which it leaves to the decoder to number
        axes = [positions] * 3
    if axes:  # in time, height and width; before them those by which rows end
        packed["position_ids"] = torch.stack([positions, *axes])
    return tuple(put(value) for value in args), packed


def change_tensors(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What a decoder returns, with each tensor in it changed."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, dict):  # as outputs of transformers are
        for name, value in output.items():
            output[name] = change_tensors(value, change)
        return output
    return tuple(change_tensors(value, change) for value in output) if isinstance(output, tuple) else output


def _of_marked(given: dict[str, Any], places: Tensor) -> dict[str, Any]:
    """Of what is given of marked tokens alone (what Qwen3-VL adds to those of pictures in its first layers), that of
    the tokens that are laid out."""
    marks, added = given.get("visual_pos_masks"), given.get("deepstack_visual_embeds")
    if marks is None or added is None:
        return {}
    numbers = put_in_places(marks.flatten().cumsum(0).mul(marks.flatten()).view(marks.shape), places)
    here = numbers[numbers.gt(0)] - 1
    return {"deepstack_visual_embeds": [of_layer[here] for of_layer in added]}


def is_per_token(value: Any, rows: tuple[int, ...]) -> bool:
    """Whether it holds something of each token of `rows`, which are so many and so long."""
    return isinstance(value, Tensor) and tuple(value.shape[:2]) == rows


def in_space(model: Any) -> bool:
    """Whether the decoder takes positions in three dimensions. Given others it spreads them, and some no longer look
    for rows in them then. What makes such positions has this name in all of transformers."""
    return any(hasattr(type(part), "get_rope_index") for part in model.modules())


def put_in_places(value: Tensor, places: Tensor) -> Tensor:
    """What there is of each token of padded rows (rows, length, ...), for packed rows (packed rows, longest, ...).
    Their padding is zeros."""
    nowhere = places.lt(0)
    found = value.flatten(0, 1)[places.clamp(min=0)]
    return found.masked_fill(nowhere.view(*nowhere.shape, *[1] * (value.ndim - 2)), 0)
