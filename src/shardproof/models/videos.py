"""Videos where torchvision is not installed: their frames, prepared by the image processor of the same model."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import BatchFeature
from transformers.utils import PushToHubMixin
from transformers.video_utils import VideoMetadata

from shardproof.errors import ConfigError


class FrameVideos(PushToHubMixin):
    """Stands where transformers' processors have a video processor, for the layouts of the families we know: grids of
    patches over two frames each (the Qwens), one picture a frame (MiniCPM-V), videos as rows of pictures (InternVL).

    Args:
        images: the model's image processor. What it knows (size of a patch, mean, scale) holds for frames too.
        config: what the model's files say about its video processor; it is saved again as it was.
    """

    _auto_class = None

    def __init__(self, images: Any, config: dict[str, Any]) -> None:
        self._images, self._config = images, dict(config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        config = self.__dict__["_config"]
        return config[name] if name in config else getattr(self.__dict__["_images"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> FrameVideos:
        return self

    def to_dict(self) -> dict[str, Any]:
        return dict(self._config)

    def __call__(
        self, videos: list[list[Any]], return_tensors: str | None = None, return_metadata: bool = False, **kwargs: Any
    ) -> BatchFeature:
        """Prepare videos, each a list of frames (PIL images of one size).

        Args:
            return_metadata: add `video_metadata`, which says when each frame was, as far as the lists know it.

        Raises:
            ConfigError: the model lays videos out in a way that only its own video processor knows.
            ValueError: the videos cannot be laid out together.
        """
        if hasattr(self._images, "merge_size"):
            data = self._grids(videos)
        elif hasattr(self._images, "slice_mode"):
            data = self._pictures(videos)
        elif hasattr(self._images, "crop_to_patches"):
            data = self._stacked(videos)
        else:
            raise ConfigError("Videos of this model need torchvision, which is not installed: pip install torchvision")
        prepared = BatchFeature(data, tensor_type=return_tensors)
        if return_metadata:
            prepared["video_metadata"] = [_metadata(video) for video in videos]
        return prepared

    def _grids(self, videos: list[list[Any]]) -> dict[str, Any]:
        """Patches of shape (patches, channels * frames of a patch * side * side), and the grid (time, rows, columns) of
        each video."""
        depth = self._images.temporal_patch_size
        patches, grids = [], []
        for video in videos:
            frames = [*video, *[video[-1]] * (-len(video) % depth)]
            size = {"size": self._config["size"]} if "size" in self._config else {}
            each = self._images(frames, return_tensors="np", **size)
            (_, rows, columns), *others = each["image_grid_thw"].tolist()
            if any(other[1:] != [rows, columns] for other in others):
                raise ValueError("the frames of a video differ in size")
            # A picture fills all `depth` frames of its patches: one of them is taken, and neighbours in time go there.
            pixels = each["pixel_values"].shape[1] // depth // 3
            filled = each["pixel_values"].reshape(len(frames) // depth, depth, rows * columns, 3, depth, pixels)
            patches.append(filled[..., 0, :].transpose(0, 2, 3, 1, 4).reshape(-1, 3 * depth * pixels))
            grids.append([len(frames) // depth, rows, columns])
        return {"pixel_values_videos": np.concatenate(patches), "video_grid_thw": np.array(grids)}

    def _pictures(self, videos: list[list[Any]]) -> dict[str, Any]:
        each = self._images([frame for video in videos for frame in video], slice_mode=False, return_tensors="np")
        return {
            "pixel_values_videos": each["pixel_values"],
            "target_sizes_videos": each["target_sizes"],
            "grids_videos": np.asarray(each["grids"]),
            "num_frames_per_video": np.array([len(video) for video in videos]),
            "num_patches_per_frame": np.asarray(each["num_patches_per_image"]),
        }

    def _stacked(self, videos: list[list[Any]]) -> dict[str, Any]:
        if len({len(video) for video in videos}) > 1:
            raise ValueError("videos with different numbers of frames do not go together")
        frames = [frame for video in videos for frame in video]
        pixels = self._images(frames, crop_to_patches=False, return_tensors="pt")["pixel_values"]
        return {"pixel_values_videos": pixels.unflatten(0, (len(videos), -1))}


def _metadata(video: list[Any]) -> VideoMetadata:
    numbers = getattr(video, "numbers", None) or list(range(len(video)))
    return VideoMetadata(
        total_num_frames=numbers[-1] + 1, fps=getattr(video, "rate", None), frames_indices=list(numbers)
    )
