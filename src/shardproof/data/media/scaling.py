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
        picture = _of_tokens(picture, limits.max_image_tokens, limits)
    picture.info[_FULL_SIZE] = full
    return picture


def _of_tokens(picture: Image, most: int, limits: Limits) -> Image:
    """The picture as whole squares, where a processor would make more of it, which rounds to whole ones."""
    (width, height), side = picture.size, limits.token_side
    if _tokens(width, height, limits) <= most:
        return picture
    scale = math.sqrt(most / (width * height))
    across = min(most, max(1, int(width * scale)))
    down = min(most // across, max(1, int(height * scale)))
    return picture.resize((across * side, down * side), resample=3)  # bicubic


def _tokens(width: int, height: int, limits: Limits) -> int:
    """What a processor makes of a picture of this size: of one that is smaller than it wants, these at least."""
    side, fewest = limits.token_side, limits.fewest_tokens
    found = round(width / side) * round(height / side)
    if found >= fewest:
        return found
    scale = math.sqrt(fewest * side**2 / (width * height))
    return math.ceil(width * scale / side) * math.ceil(height * scale / side)


def full_size(picture: Image) -> tuple[int, int]:
    """Width and height of a picture before it was scaled down."""
    size: tuple[int, int] = picture.info.get(_FULL_SIZE, picture.size)
    return size
