"""TRL's trainers as `shardproof rlhf` runs them: sharded, with rows in our order, and with answers logged."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import torch

from shardproof.train.rlhf.distilled import Distilled
from shardproof.train.rlhf.generating import Generating
from shardproof.train.rlhf.mixin import OfTokens, RlhfMixin
from shardproof.train.rlhf.pictured_batches import BESIDE
from shardproof.train.rlhf.pictures import are_pictured, with_others


class Judged(RlhfMixin):
    """KTO. To estimate how far the model is from the reference, it uses mismatched answers, made by rotating the
    answers within a micro-batch. TRL does this when it prepares the rows, so their order is fixed from then on. Here
    the micro-batches of all ranks count as one, over which the estimate is averaged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        seed = kwargs.pop("order_seed")
        batch, wanted, rows = kwargs["batch"], kwargs["args"], kwargs["train_dataset"]
        order = np.random.default_rng(seed).permutation(len(rows)).tolist()  # the same as `Dataset.shuffle`
        kwargs["train_dataset"] = rows.select(order)
        # TRL does not prepare rows with files. For evaluation, see evaluation.py.
        self._together = {"train_dataset": batch.micro * batch.readers, "eval_dataset": batch.micro}
        for name, together in self._together.items():
            if kwargs[name] is not None and are_pictured(kwargs[name]) and wanted.loss_type != "apo_zero_unpaired":
                kwargs[name] = with_others(kwargs[name], together)
        kwargs["train_dataset"].places = rows.places.in_order(order)
        super().__init__(*args, order_seed=None, **kwargs)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        together = copy.copy(args)
        together.per_device_train_batch_size = self._together[f"{dataset_name}_dataset"]
        return super()._prepare_dataset(dataset, processing_class, together, dataset_name)

    def rows_behind(self, name: str, inputs: dict[str, Any], rows: int) -> int:
        chosen = sum(map(bool, inputs["label"]))
        return chosen if name.endswith("/chosen") else rows - chosen if name.endswith("/rejected") else rows


class Contrasted(OfTokens):
    """ORPO, CPO and SimPO."""

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> Any:
        beside = batch.get(BESIDE, {})

        def forward(ids: torch.Tensor, **options: Any) -> Any:
            return model(**{"input_ids": ids, **options, **beside})

        return super().concatenated_forward(forward, batch)


class Scored(OfTokens):
    """A reward model."""

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        return dataset if are_pictured(dataset) else super()._prepare_dataset(dataset, *args)


_KINDS: dict[str, type[RlhfMixin]] = {
    "KTOTrainer": Judged,
    "ORPOTrainer": Contrasted,
    "CPOTrainer": Contrasted,
    "RewardTrainer": Scored,
    "GKDTrainer": Distilled,
    "GrpoTrainer": Generating,
    "RLOOTrainer": Generating,
    "PpoTrainer": Generating,
}


@functools.cache
def trainer_class(trainer: type[Any]) -> type[Any]:
    """The class that runs this TRL trainer in our commands."""
    mixin = _KINDS.get(trainer.__name__, RlhfMixin)
    return type(f"Sharded{trainer.__name__}", (mixin, trainer), {"__module__": __name__})
