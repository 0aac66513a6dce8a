"""How an answer is written, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Sampling:
    """How the next token is chosen, and where an answer ends.

    Attributes:
        max_new_tokens: the longest answer.
        temperature: 0 takes the likeliest token each time.
        top_p, top_k: draw from the likeliest tokens that sum up to this, and from so many; a `top_k` of 0: from all.
        repetition_penalty: what the scores of tokens that were read or written are divided by.
        num_beams: how many answers are followed at once, of which the likeliest is given.
        stop_words: texts before which an answer ends.

    What is None is as the model's `generation_config` has it, or transformers' default.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    repetition_penalty: float | None = None
    num_beams: int = 1
    stop_words: Sequence[str] = ()

    def arguments(self) -> dict[str, Any]:
        """In the words of transformers' `generate`."""
        found: dict[str, Any] = {"do_sample": self.temperature > 0, "num_beams": self.num_beams}
        if self.temperature > 0:
            found |= {"temperature": self.temperature, "top_p": self.top_p}
        chosen = {"top_k": self.top_k, "repetition_penalty": self.repetition_penalty}
        return found | {name: value for name, value in chosen.items() if value is not None}

    def ended(self, text: str) -> str:
        """What stands before the first stop word: the one that is complete first, with which an answer ends."""
        found = [(at + len(word), at) for word in self.stop_words if (at := text.find(word)) >= 0]
        return text[: min(found, default=(0, len(text)))[1]]

    def shown(self, pieces: Iterable[str]) -> Iterator[str]:
        """The same of a text that comes in pieces: what may be the beginning of a stop word is held back."""
        held = ""
        for piece in pieces:
            held += piece
            if len(before := self.ended(held)) < len(held):
                yield before
                return
            sure = len(held) - max((_begun(held, word) for word in self.stop_words), default=0)
            yield held[:sure]
            held = held[sure:]
        yield held


def _begun(text: str, word: str) -> int:
    """How many characters at the end of a text are the beginning of a word."""
    return next((n for n in range(min(len(text), len(word) - 1), 0, -1) if word.startswith(text[-n:])), 0)
