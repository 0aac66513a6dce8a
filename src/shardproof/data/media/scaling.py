"""Pictures of more pixels, or tokens, than a model is to get, made smaller."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardproof.data.media.limits import Limits

if TYPE_CHECKING:
    from PIL.Image import Image

_FULL_SIZE = "full size"  # what a picture is told under this name it is told by us, whatever its file says


def scaled(picture: Image, limits: Limits) -> Image:
    """The picture, its proportions kept, of no more pixels or tokens than the limits say."""
    width, height = full = picture.size
    if (most := limits.max_pixels) is not None and width * height > most:
        scale = math.sqrt(most / (width * height))
        picture = picture.resize((max(1, int(width * scale)), max(1, int(height * scale))), resample=3)  # bicubic
    elif limits.max_image_tokens is not None:
        picture = _of_tokens(picture, limits.max_image_tokens, limits.token_side)
    picture.info[_FULL_SIZE] = full
    return picture


def _of_tokens(picture: Image, most: int, side: int) -> Image:
    """The picture as whole squares, where a processor would make more of it, which rounds to whole ones."""
    width, height = picture.size
    if max(1, round(width / side)) * max(1, round(height / side)) <= most:
        return picture
    scale = math.sqrt(most / (width * height))
    across = min(most, max(1, int(width * scale)))
    down = min(most // across, max(1, int(height * scale)))
    return picture.resize((across * side, down * side), resample=3)  # bicubic


def full_size(picture: Image) -> tuple[int, int]:
    """Width and height of a picture before it was scaled down."""
    size: tuple[int, int] = picture.info.get(_FULL_SIZE, picture.size)
    return size
