"""Scales down images that exceed the limits in pixels or tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardproof.data.media.limits import Limits

if TYPE_CHECKING:
    from PIL.Image import Image

_FULL_SIZE = "full size"  # key in an image's info; ours overrides one from its file


def scaled(picture: Image, limits: Limits) -> Image:
    """The image scaled to the limits for pixels or tokens, keeping its proportions."""
    width, height = full = picture.size
    if (most := limits.max_pixels) is not None and width * height > most:
        scale = math.sqrt(most / (width * height))
        picture = picture.resize((max(1, int(width * scale)), max(1, int(height * scale))), resample=3)  # bicubic
    elif limits.max_image_tokens is not None:
        picture = _of_tokens(picture, limits.max_image_tokens, limits)
    picture.info[_FULL_SIZE] = full
    return picture


def _of_tokens(picture: Image, most: int, limits: Limits) -> Image:
    """The image resized to whole squares if a processor, which rounds to whole squares, would make more than `most`
    tokens of it."""
    (width, height), side = picture.size, limits.token_side
    if _tokens(width, height, limits) <= most:
        return picture
    scale = math.sqrt(most / (width * height))
    across = min(most, max(1, int(width * scale)))
    down = min(most // across, max(1, int(height * scale)))
    return picture.resize((across * side, down * side), resample=3)  # bicubic


def _tokens(width: int, height: int, limits: Limits) -> int:
    """The number of tokens for an image of this size, which a processor scales up to at least `fewest_tokens`."""
    side, fewest = limits.token_side, limits.fewest_tokens
    found = round(width / side) * round(height / side)
    if found >= fewest:
        return found
    scale = math.sqrt(fewest * side**2 / (width * height))
    return math.ceil(width * scale / side) * math.ceil(height * scale / side)


def full_size(picture: Image) -> tuple[int, int]:
    """The width and height of an image before it was scaled down."""
    size: tuple[int, int] = picture.info.get(_FULL_SIZE, picture.size)
    return size
