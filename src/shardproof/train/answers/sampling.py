"""How an answer is generated, token by token."""

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
        top_p, top_k: sample from the likeliest tokens whose probabilities sum to `top_p`, and from at most `top_k`; 0:
            from all.
        repetition_penalty: the divisor for the scores of tokens that have already occurred.
        num_beams: how many answers beam search follows; the likeliest is returned.
        stop_words: texts before which an answer ends.

    None stands for the value in the model's `generation_config`, or the default in transformers.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    repetition_penalty: float | None = None
    num_beams: int = 1
    stop_words: Sequence[str] = ()

    def arguments(self) -> dict[str, Any]:
        """The arguments for `generate` in transformers."""
        found: dict[str, Any] = {"do_sample": self.temperature > 0, "num_beams": self.num_beams}
        if self.temperature > 0:
            found |= {"temperature": self.temperature, "top_p": self.top_p}
        chosen = {"top_k": self.top_k, "repetition_penalty": self.repetition_penalty}
        return found | {name: value for name, value in chosen.items() if value is not None}

    def ended(self, text: str) -> str:
        """The text before the first stop word, which is the one that is complete first."""
        found = [(at + len(word), at) for word in self.stop_words if (at := text.find(word)) >= 0]
        return text[: min(found, default=(0, len(text)))[1]]

    def shown(self, pieces: Iterable[str]) -> Iterator[str]:
        """The same for a text that comes in pieces; a possible beginning of a stop word is held back."""
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
    """How many characters at the end of a text are a prefix of a word."""
    return next((n for n in range(min(len(text), len(word) - 1), 0, -1) if word.startswith(text[-n:])), 0)
