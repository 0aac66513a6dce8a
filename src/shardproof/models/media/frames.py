"""Models of transformers that take video frames for images.

[Note: frames] In a text for GLM-4V, a video frame uses the image token, between the marks that open and close the
video. Its models count all such tokens as image tokens, and again as video tokens, so that rows with both, or two such
rows in one batch, fail. Here a token counts according to the marks around it. In Molmo 2, a frame also uses image
tokens, and the model refuses a batch with both.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

_ONE_TOKEN = ("Glm4vModel", "Glm4vMoeModel", "Glm46VModel", "GlmOcrModel")


def frames_told_apart(model: Any) -> None:
    """Make a model (changed in place) accept images and videos in one batch. See [Note: frames]."""
    for module in model.modules():
        cls: Any = type(module)
        if cls.__module__.startswith("transformers."):
            if cls.__name__ in _ONE_TOKEN:
                module.__class__ = _telling(cls)
            elif cls.__name__ == "Molmo2Model":
                module.__class__ = _merging(cls)


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


@functools.cache
def _merging(cls: Any) -> Any:
    def forward(
        self: Any, input_ids: Any = None, pixel_values: Any = None, pixel_values_videos: Any = None, **inputs: Any
    ) -> Any:
        import torch

        if input_ids is None or pixel_values is None or pixel_values_videos is None:
            seen = {"pixel_values": pixel_values, "pixel_values_videos": pixel_values_videos}
            return cls.forward(self, input_ids=input_ids, **seen, **inputs)
        inputs.pop("mm_encoder_outputs", None)  # None: the model refuses it along with files
        of_images, of_videos = (
            [inputs.pop(name, None) for name in (f"{kind}_token_pooling", f"{kind}_grids")]
            for kind in ("image", "video")
        )
        pictures = torch.cat(self.get_image_features(pixel_values, *of_images, return_dict=True).pooler_output)
        frames = torch.cat(self.get_video_features(pixel_values_videos, *of_videos, return_dict=True).pooler_output)
        opened, closed = (
            (input_ids == mark).cumsum(-1)
            for mark in (self.config.frame_start_token_id, self.config.frame_end_token_id)
        )
        of_frames = (opened > closed)[input_ids == self.config.image_token_id]
        merged = pictures.new_empty(len(of_frames), pictures.shape[-1])
        merged = merged.masked_scatter(of_frames[:, None], frames).masked_scatter(~of_frames[:, None], pictures)
        return cls.forward(
            self, input_ids=input_ids, mm_encoder_outputs={"image": SimpleNamespace(pooler_output=(merged,))}, **inputs
        )

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def _marks(config: Any) -> tuple[int, int]:
    """The tokens that open and close a video."""
    return config.video_start_token_id, config.video_end_token_id
