"""Texts at which answers end while a model of transformers writes them.

[Note: what it has written alone] `stop_strings` of generate() look back into the question: "I think" ends an answer
that begins with " think" behind "I". A vLLM looks at what it has written alone, and so do these.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList


class Ends:
    """Texts at which answers end.

    Args:
        words: one at least.
        tokenizer: of the model that writes.
    """

    def __init__(self, words: Sequence[str], tokenizer: Any) -> None:
        self._words, self._tokenizer = words, tokenizer
        self._most = 4 * max(map(len, words)) + 4  # tokens of a word: a character may take four

    def _within(self, ids: Any) -> bool:
        text = self._tokenizer.decode(ids)
        return any(word in text for word in self._words)

    def tokens(self, ids: Sequence[int]) -> int | None:
        """How many tokens of an answer there are up to the end of the first of these texts; None where it has none."""
        if not self._within(ids):
            return None
        return bisect_left(range(len(ids)), True, key=lambda last: self._within(ids[: last + 1])) + 1

    def cut(self, ids: list[int]) -> list[int]:
        """An answer without what stands behind its end."""
        return ids[: self.tokens(ids)]

    def asked(self, generate: Any) -> Any:
        """A model's generate() that ends answers there."""

        def generated(*args: Any, **given: Any) -> Any:
            asks = given["input_ids"].shape[1]
            return generate(*args, **given, stopping_criteria=StoppingCriteriaList([Stops(self, asks)]))

        return generated

    @contextlib.contextmanager
    def of(self, model: Any) -> Iterator[None]:
        """Inside, answers of this model end there."""
        model.generate = self.asked(model.generate)
        try:
            yield
        finally:
            del model.generate


class Stops(StoppingCriteria):
    """Ends answers there; `asks`: how many tokens stand before them."""

    def __init__(self, ends: Ends, asks: int) -> None:
        self._ends, self._asks = ends, asks

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        last = max(self._asks, input_ids.shape[1] - self._ends._most)
        ended = [self._ends._within(row) for row in input_ids[:, last:].tolist()]
        return torch.tensor(ended, device=input_ids.device)
