"""No picture, and no frame, becomes more tokens than are allowed; those that would be fewer are left as they are."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shardproof.data.media.limits import Limits
from shardproof.data.media.scaling import full_size, scaled
from shardproof.errors import ConfigError
from shardproof.models.loading.processors import load_processor, square_of_token
from shardproof.train.options.config import SftConfig
from shardproof.train.rows.media import media_limits


@pytest.fixture(scope="module")
def processor(tiny_models) -> Any:
    return load_processor(str(tiny_models("qwen2_5_vl")), False)


def tokens_of(processor: Any, picture: Any) -> int:
    made = processor.image_processor(images=[picture], return_tensors="pt")
    return int(made["image_grid_thw"].prod()) // processor.image_processor.merge_size**2


def test_a_processor_makes_so_many_tokens_at_most(processor: Any) -> None:
    side, least = square_of_token(processor)  # type: ignore[misc]
    chance, several = random.Random(0), set()
    for most in (2 * least, 16, 31):
        limits = Limits(max_image_tokens=most, token_side=side)
        for _ in range(12):
            size = chance.randint(1, 20 * side), chance.randint(1, 20 * side)
            if max(size) / min(size) > 100:  # which processors refuse
                continue
            picture = Image.fromarray(np.zeros((*size, 3), dtype=np.uint8))
            before, made = tokens_of(processor, picture), scaled(picture.copy(), limits)
            assert tokens_of(processor, made) <= most
            assert full_size(made) == picture.size
            if before <= most and min(size) >= side:
                assert made.size == picture.size
            several.add(tokens_of(processor, made))
    assert len(several) > 10


def test_a_long_picture_has_no_more_either() -> None:
    picture = Image.new("RGB", (5000, 20))
    made = scaled(picture, Limits(max_image_tokens=6, token_side=28))
    assert made.size == (6 * 28, 28)


@pytest.mark.parametrize("size", [(200, 1), (1, 83), (70, 2), (76, 19), (5, 5), (30, 20)])
def test_small_pictures_are_scaled_up_within_the_bound(processor: Any, size: tuple[int, int]) -> None:
    side, fewest = square_of_token(processor)  # type: ignore[misc]
    picture = Image.new("RGB", size)
    for most in (2 * fewest, 3 * fewest, 8 * fewest):
        made = scaled(picture.copy(), Limits(max_image_tokens=most, token_side=side, fewest_tokens=fewest))
        assert tokens_of(processor, made) <= most
        if tokens_of(processor, picture) <= most:
            assert made.size == size


def test_frames_have_a_bound_of_their_own() -> None:
    of_both = Limits(max_image_tokens=64, max_frame_tokens=16, token_side=28)
    assert of_both.of_frames().max_image_tokens == 16
    assert Limits(max_image_tokens=64, max_frame_pixels=9).of_frames() == Limits(
        max_pixels=9, max_frame_pixels=9, max_image_tokens=None
    )
    assert Limits(max_pixels=9).of_frames() == Limits(max_pixels=9)


def test_the_processor_says_what_a_token_is(processor: Any) -> None:
    images = processor.image_processor
    limits = media_limits(SftConfig(max_image_tokens=64, max_frame_tokens=16), processor)
    assert limits.token_side == images.patch_size * images.merge_size


def test_bounds_that_cannot_be_are_told(processor: Any, tiny_models) -> None:
    with pytest.raises(ConfigError, match=r"--max-pixels and --max-image-tokens set the same bound"):
        media_limits(SftConfig(max_image_tokens=64, max_pixels=9), processor)
    most = 2 * square_of_token(processor)[1]  # type: ignore[index]
    with pytest.raises(
        ConfigError, match=rf"--max-image-tokens 1: .* makes up to {most} tokens from the smallest image"
    ):
        media_limits(SftConfig(max_image_tokens=1), processor)
    other = load_processor(str(tiny_models("gemma3")), False)
    with pytest.raises(ConfigError, match="does not say how many pixels a token has"):
        media_limits(SftConfig(model="gemma3", max_frame_tokens=64), other)


@pytest.mark.slow
def test_a_run_leaves_out_no_row_for_them(media_files: Path, tiny_models) -> None:
    """Of a row with a large picture, by the rows that a run would learn from."""
    from shardproof.cli import sft
    from shardproof.train.model.loading import load_processing
    from shardproof.train.run import recipe_of

    Image.new("RGB", (900, 700)).save(media_files / "large.png")
    file = media_files / "large.jsonl"
    file.write_text('{"query": "<image>x", "response": "y", "images": ["large.png"]}\n')
    model = str(tiny_models("qwen2_5_vl"))
    lengths = []
    for most in ("16", "64"):
        config, _ = sft.parse(["--model", model, "--dataset", str(file), "--max-image-tokens", most])
        recipe: Any = recipe_of(config)
        encoded = recipe.encode(config, recipe.read(config)[0], load_processing(model, config))
        lengths.append(len(encoded[0]["input_ids"]))
    assert 16 < lengths[1] - lengths[0] <= 64
