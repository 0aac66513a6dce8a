"""Sounds that end in the middle, as a download leaves them that was interrupted. A decoder plays what is there."""

from __future__ import annotations

import re
from typing import Any

from shardproof.data.forms.parts import Problem

# What libsndfile says of the samples of a WAV, in bytes: as its header has it, and as they are.
_TOLD = re.compile(r"^data : (\d+) \(should be (\d+)\)$", re.MULTILINE)
OPEN_ENDED = 0x7FFFF000  # and more is written by who does not know yet how long a sound will be


def check_whole(sound: Any) -> None:
    """Raise Problem for an open SoundFile that has fewer samples than its header says. Of formats other than WAV most
    are an error when they are read, and of the others that is not known."""
    if found := _TOLD.search(sound.extra_info):
        told, there = map(int, found.groups())
        if there < told < OPEN_ENDED:
            lasts = sound.frames / sound.samplerate
            raise Problem(
                f"it is truncated: its header says {lasts * told / there:.2f} s, but only {lasts:.2f} s are there"
            )
