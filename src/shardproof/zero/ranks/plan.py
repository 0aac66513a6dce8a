"""The operations that all ranks have agreed to carry out until the end of the step.

[Note: plans]
Most models do the same in every step. When a step ends, each rank looks up what followed earlier steps that were
like this one. If that has repeated, and is the same on all ranks (they compare digests while they agree on which
gradients exist), it becomes the plan of the next step: every rank commits itself to carry it out, in that order. So
no rank has to ask: a planned operation starts at once.

A rank that needs something else leaves the plan. The others rely on it, so it first takes part in the operations it
owes up to the next meeting: with its shards in gathers, with zeros in reductions. From then on it sends words
(consensus.py). Its word at the meeting tells the others, and all drop the rest of the plan. A plan that was left has
to repeat twice as often before it is trusted again, so a program without habits loses little.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass

_LONGEST = 100_000  # words; a program that never ends a step must not fill the memory
_MOST_PATIENT = 64  # steps
_HABITS = 64


@dataclass
class _Habit:
    """What followed one kind of step: the words of the last time, how often they repeated, and how often they need
    to."""

    words: tuple[int, ...] = ()
    repeats: int = 0
    needed: int = 1


class Plan:
    """The plan of the current step, and the habits from which the next ones are made.

    Attributes:
        words: the operations and meetings agreed on; empty if there is no plan.
        at: number of them that this rank has reached.
        left: whether this rank has left the plan since the last end.
    """

    def __init__(self) -> None:
        self.words: tuple[int, ...] = ()
        self.at = 0
        self.left = False
        self._since: list[int] = []
        self._after: tuple[int, ...] = ()
        self._habits: OrderedDict[tuple[int, ...], _Habit] = OrderedDict()
        self._candidate: tuple[int, ...] = ()

    def follow(self, word: int) -> bool:
        """Note what this rank wants. Returns whether it is what the plan has next."""
        if len(self._since) < _LONGEST:
            self._since.append(word)
        if self.at < len(self.words) and self.words[self.at] == word:
            self.at += 1
            return True
        return False

    def leave(self) -> tuple[int, ...]:
        """Drop the plan; returns the rest of it."""
        rest = self.words[self.at :]
        self.left = self.left or bool(self.words)
        self.words, self.at = (), 0
        return rest

    def end(self, word: int) -> int:
        """A step has ended with the meeting `word`. Returns the digest of what this rank would plan; 0: nothing."""
        since = tuple(self._since)
        habit = self._habits.setdefault(self._after, _Habit())
        if self.left:
            habit.needed = min(2 * habit.needed, _MOST_PATIENT)
        habit.repeats = habit.repeats + 1 if since == habit.words else 0
        habit.words = since
        self._habits.move_to_end(self._after)
        if len(self._habits) > _HABITS:
            self._habits.popitem(last=False)
        self._after, self._since = (*since, word), []
        self.words, self.at, self.left = (), 0, False
        following = self._habits.get(self._after, _Habit())
        trusted = following.repeats >= following.needed and len(following.words) < _LONGEST
        self._candidate = following.words if trusted else ()
        if not self._candidate:
            return 0
        digest = hashlib.blake2b(array("q", self._candidate).tobytes(), digest_size=7).digest()
        return 1 + int.from_bytes(digest, "little")

    def begin(self) -> None:
        """All ranks have the same digest: what this rank proposed is the plan."""
        self.words = self._candidate
