"""What may be read of the files of rows, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

SAMPLING_RATE = 16_000
# Options of commands about how much is read of files that rows name.
EITHER = ("max_pixels", "max_image_tokens"), ("max_frame_pixels", "max_frame_tokens")  # ways to say one of them
LIMITS = (*EITHER[0], *EITHER[1], "max_seconds", "max_frames", "fps")


@dataclass(frozen=True)
class Limits:
    """What may be read, and how much of it.

    Attributes:
        root: the folder that files must lie in, and that relative paths begin at. Default: that of the dataset file.
            Those of a row that stands in none may lie anywhere.
        max_pixels: larger pictures and frames are scaled down to so many pixels, their proportions kept.
        max_image_tokens: the same by the tokens that the model gets of them, squares of `token_side` pixels.
        max_frame_tokens: the same of frames of videos.
        fewest_tokens: to so many a smaller picture is scaled up by the processor.
        max_seconds: of a sound or a video; longer ones cannot be used.
        max_frame_pixels: the same of frames of videos; by default `max_pixels`.
        max_frames: of a video; evenly spread ones are taken where there are more.
        fps: frames per second that are taken of a video, `max_frames` at most; by default as many as those.
        sampling_rate: Hz, to which sounds are brought.
        remote: whether what rows name by http or https is fetched, whenever it is read.
        remote_cache: a folder in which it is kept, to be fetched once only.
        remote_bytes: of a file that is fetched, at most; `remote_seconds`: for fetching it.
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
        """Those of a video's frames, which are read as pictures are."""
        if self.max_frame_pixels or self.max_frame_tokens:
            return replace(self, max_pixels=self.max_frame_pixels, max_image_tokens=self.max_frame_tokens)
        return self

    def frames_in(self, seconds: float | None) -> int:
        """How many frames are taken at most of a video that lasts so long, where that is known."""
        if self.fps is None or seconds is None:
            return self.max_frames
        return max(1, min(self.max_frames, round(seconds * self.fps)))
