"""Frames prepared without torchvision are those that the model's own video processor makes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers.utils import is_torchvision_available

from shardproof.errors import ConfigError
from shardproof.models.loading import processors
from shardproof.models.loading.processors import load_processor
from shardproof.models.media.videos import FrameVideos
from shardproof.models.tiny_media import image_processor

# What transformers 5.23 makes of them with torchvision: patches in time, rows, columns.
GRIDS = {
    "qwen2_5_omni": [[2, 66, 98], [3, 62, 104]],  # the processor has a size of its own for videos
    "qwen3_omni_moe": [[2, 22, 32], [3, 22, 34]],
    "qwen2_5_vl": [[2, 4, 6], [3, 12, 20]],  # the size in the config holds for each frame
    "qwen3_vl": [[2, 2, 4], [3, 4, 8]],  # for all of them together
}


def video(frames: int, width: int, height: int) -> list[Image.Image]:
    slope = np.linspace(0, 255, width * height * 3).reshape(height, width, 3).astype(np.uint8)
    return [Image.fromarray(np.roll(slope, i, axis=1)) for i in range(frames)]


@pytest.fixture
def loaded(tiny_models, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The processor of a tiny model with our part for videos, also where torchvision is installed."""
    there = processors._has
    monkeypatch.setattr(processors, "_has", lambda package: package != "torchvision" and there(package))
    return lambda kind: load_processor(str(tiny_models(kind)))


@pytest.mark.parametrize("own", [False, True], ids=["ours", "transformers"])
@pytest.mark.parametrize("kind", GRIDS)
def test_frames_have_the_size_that_transformers_gives_them(loaded, tiny_models, kind: str, own: bool) -> None:
    if own and not is_torchvision_available():
        pytest.skip("transformers has a part for videos with torchvision only")
    processor = transformers.AutoProcessor.from_pretrained(tiny_models(kind)) if own else loaded(kind)
    assert isinstance(processor.video_processor, FrameVideos) is not own
    videos = [video(4, 24, 16), video(6, 200, 120)]
    mark = processor.video_token
    taken: dict[str, Any] = {"videos_kwargs": {"do_sample_frames": False}} if own else {}
    made = processor(text=[mark, mark], videos=videos, text_kwargs={"padding": True}, return_tensors="pt", **taken)
    assert made["video_grid_thw"].tolist() == GRIDS[kind]
    assert len(made["pixel_values_videos"]) == sum(np.prod(grid) for grid in GRIDS[kind])
    count = (made["input_ids"] == processor.video_token_id).sum(dim=1)
    assert count.tolist() == [np.prod(grid) // 4 for grid in GRIDS[kind]]


@pytest.mark.skipif(not is_torchvision_available(), reason="transformers has no part for videos to compare with")
@pytest.mark.parametrize("backend, levels", [("torchvision", 2), ("pil", 6)])  # of 256; they round differently
@pytest.mark.parametrize(
    "images, videos",
    [
        ("Qwen2VL", "Qwen2VL"),
        ("Qwen2VL", "Qwen3VL"),
        ("Glm4v", "Glm4v"),
        ("Glm46V", "Glm46V"),
        ("MiniCPMV4_6", "MiniCPMV4_6"),
        ("GotOcr2", "InternVL"),
    ],
)
def test_frames_are_those_of_transformers_own_part(images: str, videos: str, backend: str, levels: int) -> None:
    own = getattr(transformers, f"{videos}VideoProcessor")()
    ending = "ImageProcessor" if backend == "torchvision" else "ImageProcessorPil"
    ours = FrameVideos(getattr(transformers, images + ending)(), own.to_dict())
    asked = {"do_sample_frames": False} | ({"stack_frames": 1} if videos == "MiniCPMV4_6" else {})
    for some in ([video(4, 24, 16)], [video(5, 37, 411)], [video(2, 8, 8), video(2, 800, 600)]):
        made, wanted = ours(some, return_tensors="pt"), own(some, return_tensors="pt", **asked)
        assert set(made) == set(wanted)
        for name, values in wanted.items():
            far = np.abs(np.asarray(made[name], dtype=float) - np.asarray(values, dtype=float))
            most = (levels + 0.1) / 255 / min(own.image_std) if name == "pixel_values_videos" else 0
            assert far.max() <= most, (name, far.max(), most)


def test_values_of_a_call_come_before_those_of_the_config_and_of_pictures(loaded) -> None:
    prepare = loaded("qwen2_5_vl").video_processor
    videos = [video(2, 64, 48)]
    plain = prepare(videos, return_tensors="np")
    small = prepare(videos, return_tensors="np", size={"shortest_edge": 256, "longest_edge": 256})
    assert plain["video_grid_thw"].tolist() == [[1, 12, 16]]
    assert np.prod(small["video_grid_thw"]) <= 16
    shifted = prepare(videos, return_tensors="np", image_mean=[0.5] * 3, image_std=[0.5] * 3)
    prepare._config |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    assert np.array_equal(prepare(videos, return_tensors="np")["pixel_values_videos"], shifted["pixel_values_videos"])
    assert not np.array_equal(plain["pixel_values_videos"], shifted["pixel_values_videos"])
    del prepare._config["size"]
    prepare._config |= {"min_pixels": 256, "max_pixels": 256}  # as files of old say it
    assert prepare(videos)["video_grid_thw"].tolist() == small["video_grid_thw"].tolist()


def test_times_are_those_of_the_metadata(loaded) -> None:
    prepare = loaded("qwen3_vl").video_processor
    known = {"total_num_frames": 31, "fps": 10.0, "frames_indices": [0, 30], "duration": 3.1}
    (one,) = prepare([video(2, 64, 48)], video_metadata=[known], return_metadata=True)["video_metadata"]
    assert one.timestamps == [0, 3]


def test_what_only_the_own_processor_can_do_says_so(loaded) -> None:
    prepare = loaded("qwen2_5_vl").video_processor
    with pytest.raises(ConfigError, match="pip install torchvision"):
        prepare([video(2, 64, 48)], cap_pixels_per_frame=True)


@pytest.mark.parametrize(
    "name, type_of_videos",
    [("VideoLlama3", "VideoLlama3VideoProcessor"), ("Ernie4_5_VLMoe", None), ("Cosmos3Edge", None)],
)
def test_layouts_of_others_are_not_taken_for_those_that_are_known(name: str, type_of_videos: str | None) -> None:
    """Their pictures are grids of patches, too: videos were laid out as Qwen2-VL's, ERNIE's without the times on their
    frames."""
    images = image_processor(f"{name}ImageProcessor", size={"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28})
    prepare = FrameVideos(images, {"video_processor_type": type_of_videos} if type_of_videos else {})
    with pytest.raises(ConfigError, match="Videos of this model need torchvision"):
        prepare([video(2, 64, 48)])
