"""How much audio a processor uses. Many silently cut it off at a window, so that an answer about all of it would be
learned from its beginning."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardproof.data.forms.parts import Problem
from shardproof.data.media.reading import LEAST_SECONDS

if TYPE_CHECKING:
    import numpy as np


class Hearing:
    """Finds the longest audio that a processor uses to its end, by trying it on noise with a modified end: each
    processor has another name for its window, some process long audio in several windows, and some have none.

    Args:
        made_of: returns the processor's output for audio, float32 of shape (samples,). It may raise Problem.
        rate: sampling rate in Hz.
        most: maximum length of audio, in seconds.
    """

    def __init__(self, made_of: Callable[[np.ndarray[Any, Any]], Any], rate: int, most: float) -> None:
        self._made_of, self._rate, self._most = made_of, rate, most
        self._whole = 0.0  # seconds: audio up to this length is used in full
        self._window: float | None = None  # seconds, once longer audio was found to be cut

    def check(self, samples: int) -> None:
        """Raise Problem if the model does not hear the end of audio with this many samples. A cut shorter than the
        minimum length of audio is tolerated: encoders of MP3 and the like add a few milliseconds."""
        lasts = samples / self._rate
        if lasts > self._whole and self._window is None:
            with _quiet():
                self._try(max(lasts, min(2 * lasts, self._most)))  # doubled, so that few lengths are tried in any order
        if self._window is not None and lasts > self._window + LEAST_SECONDS:
            raise Problem(f"it lasts {lasts:.1f} s, but this model takes at most {self._window:.1f} s")

    def _try(self, seconds: float) -> None:
        """Find out whether audio of this length is used in full, or how much of it is."""
        import numpy as np

        noise = np.random.default_rng(0).normal(scale=0.1, size=math.ceil(seconds * self._rate)).astype(np.float32)

        def unheard(begin: int) -> bool:
            changed = noise.copy()
            changed[begin:] = 0
            return _same(self._made_of(changed), whole)

        try:
            whole = self._made_of(noise)
            heard, silent = (
                0,
                len(noise) - int(LEAST_SECONDS * self._rate),
            )  # a change from `heard` on shows in the output, one from `silent` on does not
            if not unheard(silent) or unheard(heard):
                self._whole = seconds
                return
            while silent - heard > self._rate // 100:
                middle = (heard + silent) // 2
                heard, silent = (heard, middle) if unheard(middle) else (middle, silent)
            self._window = silent / self._rate
        except Problem:  # the processor itself reports what it refuses
            self._whole = seconds


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' warnings about the trial audio."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _same(one: Any, other: Any) -> bool:
    """Whether two outputs of a processor are bitwise equal."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if hasattr(one, "shape"):
        return one.shape == other.shape and bool((one == other).all())
    return bool(one == other)
