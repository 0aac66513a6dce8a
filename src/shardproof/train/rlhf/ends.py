"""Texts that end an answer while a run generates it: `--stop-words`.

[Note: an answer that ends at a text] The text is the end of the answer and is learned, as in TRL and ms-swift: its
tokens up to the one that completes the text. After such an answer, a model generates padding until all answers of the
batch have ended. TRL looks for end tokens and would treat the padding as part of the answer, so the answer is cut here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from shardproof.train.answers.ends import Ends
from shardproof.train.model.loading import tokenizer_of
from shardproof.train.rlhf.mixin import OfTokens


class EndsAnswers(OfTokens):
    """A trainer whose answers end at `stop_words`."""

    def __init__(self, *args: Any, stop_words: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ends = Ends(stop_words, tokenizer_of(self.processing_class)) if stop_words else None


class EndsSampled(EndsAnswers):
    """The same for GRPO, RLOO and PPO."""

    _metrics: dict[str, dict[str, list[float]]]  # set by TRL

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if self.ends is None:
            return super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]
        with contextlib.nullcontext() if getattr(self, "use_vllm", False) else self.ends.of(self.model):
            found = super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]
        if isinstance(found, tuple):  # from GRPO, with the log-probabilities of vLLM, which stops there itself
            return [self.ends.cut(ids) for ids in found[0]], *found[1:]
        return [self.ends.cut(ids) for ids in found]

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._generate(*args, **kwargs)  # type: ignore[misc]
        if self.ends is not None:
            self._count_ended(found[1])
        return found

    def _count_ended(self, answers: Sequence[Sequence[int]]) -> None:
        """Correct TRL's metrics over all ranks: it counts an answer that ends at a stop word as truncated."""
        tokens = [*getattr(self, "eos_token_ids"), tokenizer_of(self.processing_class).pad_token_id]  # noqa: B009
        told = [(len(ids), ids[-1] in tokens or self.ends.tokens(ids) is not None) for ids in answers]  # type: ignore[union-attr]
        lengths, ended = self.accelerator.gather(torch.tensor(told, device=self.args.device)).T
        whole = lengths[ended.bool()].float()
        whole = whole if len(whole) else torch.zeros(1)
        figures = {"clipped_ratio": 1.0 - ended.float().mean()}
        figures |= {f"{name}_terminated_length": getattr(whole, name)() for name in ("mean", "min", "max")}
        for name, value in figures.items():
            self._metrics["train" if self.model.training else "eval"][f"completions/{name}"][-1] = value.item()
