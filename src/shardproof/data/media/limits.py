"""Which files of rows may be read, and how much of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

SAMPLING_RATE = 16_000
# Command-line options for how much is read of the files that rows name.
EITHER = ("max_pixels", "max_image_tokens"), ("max_frame_pixels", "max_frame_tokens")  # two ways to set a limit
LIMITS = (*EITHER[0], *EITHER[1], "max_seconds", "max_frames", "fps")


@dataclass(frozen=True)
class Limits:
    """Which files may be read, and how much of each.

    Attributes:
        root: the folder that must contain all files, and that relative paths start from. Default: that of the dataset
            file. The files of a row that is not from a dataset file may be anywhere.
        max_pixels: larger images and frames are scaled down to this many pixels, keeping their proportions.
        max_image_tokens: the same in tokens of the model, squares of `token_side` pixels.
        max_frame_tokens: the same for frames of videos.
        fewest_tokens: the processor scales smaller images up to this many tokens.
        max_seconds: the maximum length of audio and video; longer files cannot be used.
        max_frame_pixels: `max_pixels` for frames of videos; by default the same.
        max_frames: the maximum number of frames of a video; if it has more, evenly spaced ones are taken.
        fps: frames per second taken from a video, up to `max_frames`; by default, `max_frames` are taken.
        sampling_rate: the rate in Hz that audio is resampled to.
        remote: whether http and https files are fetched, each time they are read.
        remote_cache: a folder for fetched files, so that each is fetched only once.
        remote_bytes: the maximum size of a fetched file; `remote_seconds`: the maximum time for fetching it.
    """

    root: Path | None = None
    max_pixels: int | None = None
    max_seconds: float = 60.0
    max_frame_pixels: int | None = None
    max_frames: int = 16
    fps: float | None = None
    sampling_rate: int = SAMPLING_RATE
    max_image_tokens: int | None = None
    max_frame_tokens: int | None = None
    token_side: int = 1
    fewest_tokens: int = 1
    remote: bool = False
    remote_cache: Path | None = None
    remote_bytes: int = 100_000_000
    remote_seconds: float = 30.0

    def of_frames(self) -> Limits:
        """The limits for a video's frames, in terms of those for images."""
        if self.max_frame_pixels or self.max_frame_tokens:
            return replace(self, max_pixels=self.max_frame_pixels, max_image_tokens=self.max_frame_tokens)
        return self

    def frames_in(self, seconds: float | None) -> int:
        """The maximum number of frames taken from a video of this length, if the length is known."""
        if self.fps is None or seconds is None:
            return self.max_frames
        return max(1, min(self.max_frames, round(seconds * self.fps)))
