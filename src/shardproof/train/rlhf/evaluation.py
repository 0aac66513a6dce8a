"""Evaluation on pairs, judged answers and distilled answers: each row counts once, on any number of processes.

[Note: metrics of a micro-batch] TRL's trainers compute metrics over a micro-batch on all ranks, and average these: a
last micro-batch with few rows weighs as much as a full one, and rows that accelerate repeats to give all ranks the same
number count as well. Here a micro-batch belongs to one rank, has the same rows on any number of ranks, and is weighted
by its number of rows. So means over rows are exact, and a mean over the tokens of a micro-batch depends only on its
size.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch.distributed as dist
from transformers.trainer_utils import EvalLoopOutput

from shardproof.train.losses.by_file import in_chunks
from shardproof.train.rows.sampler import eval_batches
from shardproof.zero.comm.groups import all_gather_object

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

FIGURES = ("_metrics", "_stored_metrics")  # where TRL's trainers keep metrics until they are logged


def evaluate_rows(trainer: Any, loader: DataLoader[Any], prefix: str) -> EvalLoopOutput:
    """The mean loss over the rows of `loader`. Means of TRL's metrics are stored where its `log` reads them."""
    rows: Any = loader.dataset
    args, collate = trainer.args, loader.collate_fn
    batch = trainer.batch_plan
    reader = args.process_index // batch.sequence
    plan = eval_batches(in_chunks(range(len(rows)), args.per_device_eval_batch_size), reader, batch.readers)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    trainer.model.eval()  # it stays in this mode, from which TRL's `log` knows that these are metrics of an evaluation
    _taken(trainer)
    with _by_itself(trainer.accelerator), trainer.sequence:
        for indices, counts in trainer.each_evaluated(plan):
            inputs = trainer._prepare_inputs(collate([rows[i] for i in indices]))
            loss, *_ = trainer.prediction_step(trainer.model, inputs, prediction_loss_only=True)
            found = {"loss": float(loss), **_taken(trainer)}
            for name, value in found.items() if counts else ():
                if weight := trainer.rows_behind(name, inputs, len(indices)):
                    sums[name][0] += weight * value
                    sums[name][1] += weight
    trainer._meet()  # ranks that have not finished may need slices from this one
    means = _across(sums)
    loss = means.pop("loss")
    if means.keys() >= {"rewards/chosen", "rewards/rejected"}:
        # In kto, chosen and rejected are different rows, so there are no differences to average, and a micro-batch may
        # lack one kind.
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    for figures in _figures(trainer):
        figures.update({name: [mean] for name, mean in means.items()})
    return EvalLoopOutput(predictions=None, label_ids=None, metrics={f"{prefix}_loss": loss}, num_samples=len(rows))


@contextlib.contextmanager
def _by_itself(accelerator: Any) -> Iterator[None]:
    """Inside the context, a rank gathers only its own values."""
    with contextlib.ExitStack() as stack:
        for name in ("gather", "gather_for_metrics"):
            stack.enter_context(mock.patch.object(accelerator, name, lambda values, *args, **kwargs: values))
        yield


def _figures(trainer: Any) -> list[dict[str, list[Any]]]:
    return [getattr(trainer, name)["eval"] for name in FIGURES if hasattr(trainer, name)]


def _taken(trainer: Any) -> dict[str, float]:
    """The metrics of one micro-batch, which are then cleared."""
    found = {name: float(values[-1]) for figures in _figures(trainer) for name, values in figures.items() if values}
    for figures in _figures(trainer):
        figures.clear()
    return found


def _across(sums: dict[str, list[float]]) -> dict[str, float]:
    """The means over all ranks; some ranks may lack metrics that others have."""
    everyone = all_gather_object(None, dict(sums)) if dist.is_initialized() else [sums]
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    return {
        name: sum(theirs[name][0] for theirs in everyone if name in theirs)
        / sum(theirs[name][1] for theirs in everyone if name in theirs)
        for name in names
    }
