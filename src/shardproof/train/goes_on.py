"""What to do with a run that ended too early, in words: how it goes on, and what is kept."""

from __future__ import annotations

import shlex
from pathlib import Path

from shardproof.errors import exported
from shardproof.train.options.config import RunConfig
from shardproof.train.resume import AUTO, same_folder


def way_on(config: RunConfig, newest: Path, mended: str = "", restarted: bool = False) -> str:
    """How a run goes on from its newest checkpoint, whose folder is that of the run.

    Args:
        mended: what comes first, in front of a clause.
        restarted: whether a launcher began it again, so that --resume may be its word and not the user's.
    """
    folder = shlex.quote(str(newest.parent))
    its = f"its newest checkpoint is {newest}"
    if config.save_only_model:
        return f"{its}, which holds weights only, so that no run goes on from it: {exported(newest)}"
    if restarted:
        return f"{its}: {mended}--resume {folder} goes on from it"
    if config.resume is None:
        return f"{its}: {mended}add --resume {folder} to go on"
    if config.resume == AUTO or same_folder(config.resume, newest.parent) or same_folder(config.resume, newest):
        return f"{its}: {mended}the same command goes on from it"
    return f"{its}: {mended}take --resume {folder} in place of --resume {shlex.quote(config.resume)} to go on"


def without_checkpoint(config: RunConfig, begun_from: Path | None, failed: bool) -> str:
    """What a run without a checkpoint of its own would have needed. `failed`: it would fail alike when it begins again.

    Args:
        begun_from: the checkpoint of another run from which it began.
    """
    lost = f"nothing that was learnt since {begun_from} is kept" if begun_from else "nothing that was learnt is kept"
    if config.writes_checkpoints:
        return f"{lost}: no checkpoint was complete yet"
    again = "; --max-restarts N would have gone on from there by itself" if config.nproc > 1 and not failed else ""
    return f"{lost}: --save-steps N would have kept it every N steps{again}"


def left_by(newest: str | None, begun_from: str | None, weights_only: bool) -> str:
    """Where there are weights from before they became NaN, and what can be done with them.

    Args:
        newest: the newest checkpoint in the folder of the run.
        begun_from: the one that it has gone on from.
        weights_only: whether the run's own are such.
    """
    start = newest or begun_from
    if start is None:
        return "There is no checkpoint to go back to."
    told = f"The newest checkpoint was written before: {start}\n"
    if weights_only and newest:
        return f"{told}It holds weights only. With a lower rate: {exported(start)}."
    if begun_from:  # --resume has been given already
        return f"{told}A run that goes on from it keeps these options. With a lower rate: {exported(start)}."
    return f"{told}--resume goes on from it with the same options. With a lower rate: {exported(start)}."
