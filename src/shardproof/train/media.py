"""The options about pictures, sounds and videos, as the data room takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardproof.data.media import SAMPLING_RATE, Limits
from shardproof.train.config import RunConfig


def media_limits(config: RunConfig, processor: Any) -> Limits:
    """What may be read, and the sampling rate that the model wants sounds at."""
    hears = getattr(processor, "feature_extractor", None)
    return Limits(
        root=Path(config.media_root).expanduser() if config.media_root else None,
        max_pixels=config.max_pixels,
        max_seconds=config.max_seconds,
        max_frames=config.max_frames,
        sampling_rate=getattr(hears, "sampling_rate", SAMPLING_RATE),
    )
