"""The Trainer of `shardproof sft --task seq_cls`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardproof.data.forms.labels import Labels
from shardproof.train.seq_cls import measures
from shardproof.train.seq_cls.labelling import write_labels
from shardproof.train.trainer import SftTrainer


class ScoringTrainer(SftTrainer):
    """For models that only return logits. Losses are sums over the learned items, divided by their number in the step
    on all ranks. Rows whose files are lost do not count."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor:
        mine = torch.tensor(sum(self._learnt(batch) for batch in batch_samples), device=device)
        whole = self.accelerator.gather(mine).sum() if self.accelerator.num_processes > 1 else mine
        return whole.clamp(min=1)  # all rows of a step may have lost their files


class SeqClsTrainer(ScoringTrainer):
    """Losses are sums over rows divided by the rows of the step on all ranks.

    Args:
        labels: the labels; batches come from `collate_labelled`.
    """

    def __init__(self, *args: Any, labels: Labels, **kwargs: Any) -> None:
        self.labels = labels
        super().__init__(*args, loss=measures.LabelLoss(labels), **kwargs)

    @property
    def _width(self) -> int:
        return super()._width + measures.width(self.labels)

    def _sums(self, loss: torch.Tensor, outputs: Any, inputs: dict[str, Any]) -> list[float]:
        more = measures.sums(self.labels, outputs["logits"], inputs["labels"])
        return [*super()._sums(loss, outputs, inputs), *more]

    def _means(self, sums: list[float]) -> dict[str, float]:
        own = super()._width
        return super()._means(sums[:own]) | measures.means(self.labels, sums[own:])

    def _learnt(self, inputs: dict[str, Any]) -> int:
        return len(inputs["labels"])

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        write_labels(Path(output_dir or self.args.output_dir), self.labels)
