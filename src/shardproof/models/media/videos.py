"""Videos without torchvision: frames are prepared by the model's image processor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from transformers import BatchFeature
from transformers.processing_utils import VideosKwargs
from transformers.utils import PushToHubMixin
from transformers.video_utils import VideoMetadata

from shardproof.errors import ConfigError

# Options for which video processors have their own values, and which image processors also take.
_VALUES = (
    *("do_resize", "size", "resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std"),
    *("patch_size", "merge_size", "temporal_patch_size"),
    *("slice_mode", "max_slice_nums", "scale_resolution", "downsample_mode"),
)

# Video processors whose `size` limits the pixels of all frames together, not of each.
_COUNT_ALL_FRAMES = ("Qwen3VLVideoProcessor", "Glm4vVideoProcessor", "Glm46VVideoProcessor")

# Video processors of transformers with the layouts implemented here.
_KNOWN = ("Qwen2VLVideoProcessor", *_COUNT_ALL_FRAMES, "MiniCPMV4_6VideoProcessor", "InternVLVideoProcessor")

_NEEDS_TORCHVISION = "Videos of this model need torchvision, which is not installed: pip install torchvision"


class FrameVideos(PushToHubMixin):
    """Replaces the video processor in transformers' processors, for the layouts of known families: grids of patches
    over two frames each (the Qwens), one image per frame (MiniCPM-V), videos as rows of images (InternVL).

    Args:
        images: the model's image processor. Its values (patch size, mean, scale) also apply to frames, unless a call or
            the config says otherwise.
        config: the config of the video processor in the model's files; it is saved unchanged.
    """

    _auto_class = None
    valid_kwargs = VideosKwargs

    def __init__(self, images: Any, config: dict[str, Any]) -> None:
        self._images, self._config = images, dict(config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        config = self.__dict__["_config"]
        return config[name] if name in config else getattr(self.__dict__["_images"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> FrameVideos:
        return self

    @property
    def font(self) -> str:
        """The path of the font for drawing times on frames: ERNIE's processor saves a copy of it."""
        return str(self._config.get("font", ""))

    def to_dict(self) -> dict[str, Any]:
        return self._config | ({"font": Path(self.font).name} if self.font else {})

    def __call__(
        self,
        videos: list[list[Any]],
        return_tensors: str | None = None,
        return_metadata: bool = False,
        video_metadata: list[Mapping[str, Any]] | None = None,
        **given: Any,
    ) -> BatchFeature:
        """Prepare videos, each a list of frames (PIL images of one size); all frames are used.

        Args:
            return_metadata: add `video_metadata`, with the time of each frame.
            video_metadata: for each video, the fields of transformers' `VideoMetadata`.
            given: options of transformers' video processors, such as `size`.

        Raises:
            ConfigError: only the model's own video processor supports its layout of videos.
            ValueError: the videos cannot be put into one batch.
        """
        values = self._values(given)
        if self._name not in _KNOWN and hasattr(transformers, self._name):
            raise ConfigError(_NEEDS_TORCHVISION)
        if hasattr(self._images, "merge_size"):
            data = self._grids(videos, values)
        elif hasattr(self._images, "slice_mode"):
            data = self._pictures(videos, values)
        elif hasattr(self._images, "crop_to_patches"):
            data = self._stacked(videos, values)
        else:
            raise ConfigError(_NEEDS_TORCHVISION)
        prepared = BatchFeature(data, tensor_type=return_tensors)
        if return_metadata:
            known = video_metadata or [
                {"total_num_frames": len(video), "frames_indices": list(range(len(video)))} for video in videos
            ]
            prepared["video_metadata"] = [VideoMetadata(**one) for one in known]
        return prepared

    @property
    def _name(self) -> str:
        """The class that transformers has for it: if the config does not say, the counterpart of the image
        processor."""
        of_images = type(self._images).__name__.removesuffix("Pil")
        return str(self._config.get("video_processor_type") or of_images.replace("ImageProcessor", "VideoProcessor"))

    def _values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The options for the image processor: values from this call, or else from the config."""
        both = {**self._config, **{name: value for name, value in given.items() if value is not None}}
        if both.get("cap_pixels_per_frame"):
            raise ConfigError(_NEEDS_TORCHVISION)
        if given.get("size") is None:  # older configs name the edges one by one
            edges = {"shortest_edge": both.get("min_pixels"), "longest_edge": both.get("max_pixels")}
            named = {edge: pixels for edge, pixels in edges.items() if pixels is not None}
            both |= {"size": {**dict(self.size), **named}} if named else {}
        taken = self._images.valid_kwargs.__annotations__
        return {name: both[name] for name in _VALUES if name in taken and both.get(name) is not None}

    def _grids(self, videos: list[list[Any]], values: dict[str, Any]) -> dict[str, Any]:
        """Patches of shape (patches, channels * frames of a patch * side * side), and the grid (time, rows, columns) of
        each video."""
        depth = values.get("temporal_patch_size", self._images.temporal_patch_size)
        patches, grids = [], []
        for video in videos:
            resized, left = self._resized(video, depth, values)
            frames = [*resized, *[resized[-1]] * (-len(video) % depth)]
            each = self._images(frames, return_tensors="np", **left)
            (_, rows, columns), *others = each["image_grid_thw"].tolist()
            if any(other[1:] != [rows, columns] for other in others):
                raise ValueError("the frames of a video differ in size")
            # An image fills all `depth` frames of its patches: one of them is taken, and consecutive frames go there.
            pixels = each["pixel_values"].shape[1] // depth // 3
            filled = each["pixel_values"].reshape(len(frames) // depth, depth, rows * columns, 3, depth, pixels)
            patches.append(filled[..., 0, :].transpose(0, 2, 3, 1, 4).reshape(-1, 3 * depth * pixels))
            grids.append([len(frames) // depth, rows, columns])
        return {"pixel_values_videos": np.concatenate(patches), "video_grid_thw": np.array(grids)}

    def _resized(self, video: list[Any], depth: int, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The frames, resized here if that depends on their number, and the options for the remaining steps."""
        if self._name not in _COUNT_ALL_FRAMES or not values.get("do_resize", True):
            return video, values
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

        wanted = ("size", "resample", "patch_size", "merge_size")
        size, resample, side, merged = (values.get(name, getattr(self._images, name)) for name in wanted)
        height, width = smart_resize(
            len(video),
            *reversed(video[0].size),
            temporal_factor=depth,
            factor=side * merged,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
        )
        return [frame.resize((width, height), resample) for frame in video], {**values, "do_resize": False}

    def _pictures(self, videos: list[list[Any]], values: dict[str, Any]) -> dict[str, Any]:
        each = self._images([frame for video in videos for frame in video], return_tensors="np", **values)
        return {
            "pixel_values_videos": each["pixel_values"],
            "target_sizes_videos": each["target_sizes"],
            "grids_videos": np.asarray(each["grids"]),
            "num_frames_per_video": np.array([len(video) for video in videos]),
            "num_patches_per_frame": np.asarray(each["num_patches_per_image"]),
        }

    def _stacked(self, videos: list[list[Any]], values: dict[str, Any]) -> dict[str, Any]:
        if len({len(video) for video in videos}) > 1:
            raise ValueError("videos with different numbers of frames cannot be put into one batch")
        frames = [frame for video in videos for frame in video]
        pixels = self._images(frames, return_tensors="pt", **values, crop_to_patches=False)["pixel_values"]
        return {"pixel_values_videos": pixels.unflatten(0, (len(videos), -1))}
