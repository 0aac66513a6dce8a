"""Models of transformers that take the frames of a video for pictures of their own.

[Note: frames] In a text of GLM-4V a frame of a video takes the token of a picture, between the marks that open and
close the video. Its models count all such tokens as those of the pictures, and again as those of the videos, so that
rows with both, or two such rows in one batch, fail. Here a token counts as what the marks around it say.
"""

from __future__ import annotations

import functools
from typing import Any

_ONE_TOKEN = ("Glm4vModel", "Glm4vMoeModel", "Glm46VModel", "GlmOcrModel")


def frames_told_apart(model: Any) -> None:
    """Have a model (changed in place) take pictures and videos in one batch. See [Note: frames]."""
    for module in model.modules():
        cls: Any = type(module)
        if cls.__name__ in _ONE_TOKEN and cls.__module__.startswith("transformers."):
            module.__class__ = _telling(cls)


@functools.cache
def _telling(cls: Any) -> Any:
    def get_placeholder_mask(
        self: Any, input_ids: Any, inputs_embeds: Any, image_features: Any = None, video_features: Any = None
    ) -> Any:
        if input_ids is None:
            return cls.get_placeholder_mask(self, input_ids, inputs_embeds, image_features, video_features)
        opened, closed = ((input_ids == mark).cumsum(-1) for mark in _marks(self.config))
        other = self.config.video_token_id  # stands for no file
        pictures = input_ids.masked_fill(opened > closed, other)
        frames = input_ids.masked_fill(opened <= closed, other)
        images, _ = cls.get_placeholder_mask(self, pictures, inputs_embeds, image_features)
        _, videos = cls.get_placeholder_mask(self, frames, inputs_embeds, None, video_features)
        return images, videos

    own = {"get_placeholder_mask": get_placeholder_mask, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), own)


def _marks(config: Any) -> tuple[int, int]:
    """The tokens that open and close a video."""
    return config.video_start_token_id, config.video_end_token_id
