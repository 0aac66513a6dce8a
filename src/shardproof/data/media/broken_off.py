"""Detects truncated audio files, for example from an interrupted download. A decoder plays whatever is there."""

from __future__ import annotations

import re
from typing import Any

from shardproof.data.forms.parts import Problem

# libsndfile's log of the size of a WAV's samples in bytes: according to its header, and actual.
_TOLD = re.compile(r"^data : (\d+) \(should be (\d+)\)$", re.MULTILINE)
OPEN_ENDED = 0x7FFFF000  # this or more is written by programs that do not know the length yet


def check_whole(sound: Any) -> None:
    """Raise Problem for an open SoundFile that has fewer samples than its header says. Most other formats than WAV
    raise an error when read; for the rest it cannot be detected."""
    if found := _TOLD.search(sound.extra_info):
        told, there = map(int, found.groups())
        if there < told < OPEN_ENDED:
            lasts = sound.frames / sound.samplerate
            raise Problem(
                f"it is truncated: its header says {lasts * told / there:.2f} s, but only {lasts:.2f} s are there"
            )
