"""The text of names and boxes of objects, as each model family writes it.

This needs opened images, since coordinates depend on the image size that the model sees. Labels are found with the same
text that batches are made of (see [Note: twice] in `encode.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardproof.data.forms.objects import OBJECTS, PLACE, PLACED, Box
from shardproof.data.forms.parts import Problem, refusal, with_texts
from shardproof.data.media.reading import full_size
from shardproof.models.families.known import FAMILIES, grounding_of

EDGE = 1  # pixels that a box may exceed its image by: those of COCO do so by fractions of a pixel


class Grounded:
    """The text of objects for a model with this processor."""

    def __init__(self, processor: Any) -> None:
        self._processor, self._form = processor, grounding_of(processor)
        self._resized: dict[tuple[int, int], tuple[int, int]] = {}

    def filled(self, turns: Sequence[Mapping[str, Any]], pictures: Sequence[Any]) -> list[dict[str, Any]]:
        """The turns of a row with its objects written into their texts.

        Raises:
            Problem: a box is outside its image, or the model's format for boxes is not known.
        """
        return [self._filled(turn, pictures) if PLACED in turn else dict(turn) for turn in turns]

    def _filled(self, turn: Mapping[str, Any], pictures: Sequence[Any]) -> dict[str, Any]:
        written = iter([self._written(thing, pictures) for thing in turn[PLACED]])
        content = with_texts(turn["content"], lambda text: PLACE.sub(lambda _: next(written), text))
        return {name: value for name, value in turn.items() if name != PLACED} | {"content": content}

    def _written(self, thing: str | Box, pictures: Sequence[Any]) -> str:
        form = self._form
        if form is None:
            known = ", ".join(family.name for family in FAMILIES if family.grounding is not None)
            raise Problem(
                f"its '{OBJECTS}' cannot be filled in: their format for models with {type(self._processor).__name__} "
                f"is not known, only that for {known}. Write names and coordinates into the text"
            )
        if isinstance(thing, str):
            return form.name.format(thing)
        picture = pictures[thing.picture]
        width, height = full_size(picture)
        if thing.real and any(x >= side + EDGE for x, side in zip(thing.numbers, (width, height) * 2, strict=False)):
            raise Problem(
                f"a box of its '{OBJECTS}', {list(thing.numbers)}, extends beyond image {thing.picture + 1}, which "
                f"has {width} x {height} pixels"
            )
        whole = (width, height) if thing.real else (1, 1)
        sides = self._as_resized(picture.size) if form.pixels else (1000, 1000)
        # In this order, to round like ms-swift.
        inside = [min(x, whole[i % 2]) for i, x in enumerate(thing.numbers)]
        numbers = [round(x / whole[i % 2] * sides[i % 2]) for i, x in enumerate(inside)]
        points = ",".join(f"({x},{y})" for x, y in zip(numbers[::2], numbers[1::2], strict=True))
        return form.box.format(points=points, list=numbers)

    def _as_resized(self, size: tuple[int, int]) -> tuple[int, int]:
        """The width and height to which the processor resizes an image of this size."""
        if size not in self._resized:
            from PIL import Image

            images = self._processor.image_processor
            try:
                _, high, wide = images([Image.new("RGB", size)], return_tensors="pt")["image_grid_thw"][0].tolist()
            except Exception as error:
                raise refusal(self._processor, error) from error
            self._resized[size] = wide * images.patch_size, high * images.patch_size
        return self._resized[size]
