"""Texts at which answers end while a run writes them: `--stop-words`.

[Note: an answer that ends at a text] The text is the end of the answer, and is learnt, as in TRL and ms-swift: its
tokens up to the one with which the text is complete. A model of transformers is told to stop by what it has written
alone, as a vLLM is, where `stop_strings` of generate() would look back into the question. Behind such an answer it
writes padding until all answers of the batch have ended, and TRL, which looks for tokens that end a text, takes that
for the answer: so what it has is cut here.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from shardproof.train.model.loading import tokenizer_of
from shardproof.train.rlhf.mixin import OfTokens


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
            return generate(*args, **given, stopping_criteria=StoppingCriteriaList([_Stops(self, asks)]))

        return generated

    @contextlib.contextmanager
    def of(self, model: Any) -> Iterator[None]:
        """Inside, answers of this model end there."""
        model.generate = self.asked(model.generate)
        try:
            yield
        finally:
            del model.generate


class _Stops(StoppingCriteria):
    def __init__(self, ends: Ends, asks: int) -> None:
        self._ends, self._asks = ends, asks

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        last = max(self._asks, input_ids.shape[1] - self._ends._most)
        ended = [self._ends._within(row) for row in input_ids[:, last:].tolist()]
        return torch.tensor(ended, device=input_ids.device)


class EndsAnswers(OfTokens):
    """A trainer whose answers end at `stop_words`."""

    def __init__(self, *args: Any, stop_words: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ends = Ends(stop_words, tokenizer_of(self.processing_class)) if stop_words else None


class EndsSampled(EndsAnswers):
    """The same of GRPO, RLOO and PPO."""

    _metrics: dict[str, dict[str, list[float]]]  # of TRL

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if self.ends is None:
            return super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]
        with contextlib.nullcontext() if getattr(self, "use_vllm", False) else self.ends.of(self.model):
            found = super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]
        if isinstance(found, tuple):  # of GRPO, beside what a vLLM says of its tokens, which ends there itself
            return [self.ends.cut(ids) for ids in found[0]], *found[1:]
        return [self.ends.cut(ids) for ids in found]

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._generate(*args, **kwargs)  # type: ignore[misc]
        if self.ends is not None:
            self._count_ended(found[1])
        return found

    def _count_ended(self, answers: Sequence[Sequence[int]]) -> None:
        """TRL takes an answer that ends at a text for one that was cut: its figures, of all ranks, said right."""
        tokens = [*getattr(self, "eos_token_ids"), tokenizer_of(self.processing_class).pad_token_id]  # noqa: B009
        told = [(len(ids), ids[-1] in tokens or self.ends.tokens(ids) is not None) for ids in answers]  # type: ignore[union-attr]
        lengths, ended = self.accelerator.gather(torch.tensor(told, device=self.args.device)).T
        whole = lengths[ended.bool()].float()
        whole = whole if len(whole) else torch.zeros(1)
        figures = {"clipped_ratio": 1.0 - ended.float().mean()}
        figures |= {f"{name}_terminated_length": getattr(whole, name)() for name in ("mean", "min", "max")}
        for name, value in figures.items():
            self._metrics["train" if self.model.training else "eval"][f"completions/{name}"][-1] = value.item()
