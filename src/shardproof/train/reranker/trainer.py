"""The Trainer of `shardproof sft --task reranker` and `generative_reranker`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardproof.train.reranker import ranking
from shardproof.train.reranker.drawn import DrawnPairs
from shardproof.train.reranker.scoring import Scoring
from shardproof.train.seq_cls.trainer import ScoringTrainer


class RerankerTrainer(ScoringTrainer):
    """Losses are sums over pairs (with `listwise`, over positives) divided by their number in the step on all ranks.

    Args:
        scoring: how the model scores a pair.
        kind: the loss.
        temperature: the divisor of scores in the loss `listwise`.
        most: how many positives and negatives of a row each pass over the rows draws; None for all.
    """

    def __init__(
        self,
        *args: Any,
        scoring: Scoring,
        kind: str,
        temperature: float,
        most: tuple[int | None, int | None] = (None, None),
        **kwargs: Any,
    ) -> None:
        if most != (None, None):
            kwargs["train_dataset"] = DrawnPairs(kwargs["train_dataset"], *most, kwargs["order_seed"])
        self.scoring, self.kind, self.temperature = scoring, kind, temperature
        super().__init__(*args, loss=self._loss, **kwargs)

    def _loss(self, outputs: Any, labels: dict[str, Any], num_items_in_batch: Any) -> torch.Tensor:
        loss = getattr(ranking, self.kind)
        return (
            loss(self._scores(outputs, labels), labels["relevant"], labels["counts"], self.temperature)
            / num_items_in_batch
        )  # type: ignore[no-any-return]

    def _scores(self, outputs: Any, labels: dict[str, Any]) -> torch.Tensor:
        """The scores of the pairs of rows: a batch whose rows are all lost still has a text, which belongs to no
        row."""
        return self.scoring.scores(outputs)[: len(labels["relevant"])]

    def _learnt(self, inputs: dict[str, Any]) -> int:
        relevant = inputs["labels"]["relevant"]
        return len(relevant) if self.kind == "pointwise" else int(relevant.sum())

    @property
    def _width(self) -> int:
        return super()._width + 1 + len(ranking.MEASURES)

    def _sums(self, loss: torch.Tensor, outputs: Any, inputs: dict[str, Any]) -> list[float]:
        labels = inputs["labels"]
        more = ranking.sums(self._scores(outputs, labels), labels["relevant"], labels["counts"])
        return [float(loss), float(self._learnt(inputs)), *more]

    def _means(self, sums: list[float]) -> dict[str, float]:
        own = super()._width
        return super()._means(sums[:own]) | ranking.means(sums[own:])

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        self.scoring.write(Path(output_dir or self.args.output_dir))
