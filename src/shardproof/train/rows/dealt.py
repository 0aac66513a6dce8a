"""What changes when a run is resumed on a different number of processes, even though each step has the same rows:
losses that compare the rows of a micro-batch across processes, and answers that each process samples."""

from __future__ import annotations

import logging
from pathlib import Path

from shardproof.train.options.batch import Batch
from shardproof.train.options.config import RunConfig, SftConfig
from shardproof.train.options.rlhf_config import RlhfConfig, draws_answers
from shardproof.train.options.task_losses import INFONCE, loss_of

log = logging.getLogger("shardproof")


def dealt(batch: Batch) -> dict[str, int]:
    """What a checkpoint records about it."""
    return {"together": batch.micro * batch.readers, "processes": batch.world_size}


def tell_other_processes(saved: dict[str, int] | None, start: Path, config: RunConfig, batch: Batch) -> None:
    """Log the messages of `other_processes`."""
    for told in other_processes(saved, start, config, batch):
        log.warning("%s", told)


def other_processes(saved: dict[str, int] | None, start: Path, config: RunConfig, batch: Batch) -> list[str]:
    """Why losses from here on differ from those of the run that wrote the checkpoint, and how to keep them.
    `saved`: what the checkpoint records; None if an earlier release wrote it."""
    here, told = dealt(batch), []
    if not saved or saved == here:
        return []
    if (what := _compared(config)) and saved["together"] != here["together"]:
        keeps, odd = divmod(saved["together"], batch.readers)
        now = f"{here['together']} now and {saved['together']} in {start}"
        kept = "" if odd else f" --per-device-batch-size {keeps} keeps them."
        told.append(f"{what}, {now}: the losses from here on differ from those of an uninterrupted run.{kept}")
    if draws_answers(config) and saved["processes"] != here["processes"]:
        numbers = f"on {here['processes']} instead of {saved['processes']}"
        told.append(f"Each process samples its answers at random: {numbers}, the run continues with different answers.")
    return told


def _compared(config: RunConfig) -> str:
    """How a loss compares the rows of a micro-batch, in words; empty for a loss that does not."""
    if isinstance(config, RlhfConfig):
        alone = config.rlhf_type != "kto" or config.loss_type == ["apo_zero_unpaired"]
        return "" if alone else "The reference point of kto is a mean over rows of all processes' micro-batches"
    if isinstance(config, SftConfig) and config.task == "embedding" and loss_of(config) == INFONCE:
        return "With --loss infonce, a row is compared with the rows in the micro-batches of all processes"
    return ""
