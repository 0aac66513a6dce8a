"""How much of a sound a processor takes. Many cut it off at a window of theirs without a word, and the answer about all
of it would be learnt from its beginning."""

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
    """The longest sound that a processor hears to its end. It is found by trying, with noise whose end is changed: each
    processor calls its window something else, some hear a long sound in several windows, and some have none.

    Args:
        made_of: what the processor makes of a sound, float32 of shape (samples,). It may raise Problem.
        rate: Hz, of sounds.
        most: seconds; there are no longer sounds.
    """

    def __init__(self, made_of: Callable[[np.ndarray[Any, Any]], Any], rate: int, most: float) -> None:
        self._made_of, self._rate, self._most = made_of, rate, most
        self._whole = 0.0  # seconds: so long a sound is heard whole
        self._window: float | None = None  # seconds, once a longer sound was found to be cut

    def check(self, samples: int) -> None:
        """Raise Problem for a sound of so many samples if the model does not hear its end. What is left unheard has to
        be as long as a sound must be: encoders of MP3 and the like add a few milliseconds."""
        lasts = samples / self._rate
        if lasts > self._whole and self._window is None:
            with _quiet():
                self._try(max(lasts, min(2 * lasts, self._most)))  # twice: few lengths are tried, whatever the order
        if self._window is not None and lasts > self._window + LEAST_SECONDS:
            raise Problem(f"it lasts {lasts:.1f} s, but this model takes at most {self._window:.1f} s")

    def _try(self, seconds: float) -> None:
        """Find out whether a sound of so many seconds is heard whole, or how much of it is."""
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
            )  # a change shows from here on; from there not
            if not unheard(silent) or unheard(heard):
                self._whole = seconds
                return
            while silent - heard > self._rate // 100:
                middle = (heard + silent) // 2
                heard, silent = (heard, middle) if unheard(middle) else (middle, silent)
            self._window = silent / self._rate
        except Problem:  # the processor says itself what it does not take
            self._whole = seconds


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of transformers about sounds that are nobody's."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _same(one: Any, other: Any) -> bool:
    """Whether two outputs of a processor are equal to the last bit."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if hasattr(one, "shape"):
        return one.shape == other.shape and bool((one == other).all())
    return bool(one == other)
