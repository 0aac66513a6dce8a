"""Messages for a run that ended too early: how to continue it, and what is kept."""

from __future__ import annotations

import shlex
from pathlib import Path

from shardproof.errors import exported
from shardproof.train.options.config import RunConfig
from shardproof.train.resume import AUTO, same_folder


def way_on(config: RunConfig, newest: Path, mended: str = "", restarted: bool = False) -> str:
    """How to continue a run from its newest checkpoint, which lies in the run folder.

    Args:
        mended: what to do first, to be put before a clause.
        restarted: whether a launcher restarted it, so that --resume may come from the launcher instead of the user.
    """
    folder = shlex.quote(str(newest.parent))
    its = f"its newest checkpoint is {newest}"
    if config.save_only_model:
        return f"{its}, which holds weights only, so no run can resume from it: {exported(newest)}"
    if restarted:
        return f"{its}: {mended}--resume {folder} continues from it"
    if config.resume is None:
        return f"{its}: {mended}add --resume {folder} to continue"
    if config.resume == AUTO or same_folder(config.resume, newest.parent) or same_folder(config.resume, newest):
        return f"{its}: {mended}the same command continues from it"
    return f"{its}: {mended}use --resume {folder} instead of --resume {shlex.quote(config.resume)} to continue"


def without_checkpoint(config: RunConfig, begun_from: Path | None, failed: bool) -> str:
    """What a run without a checkpoint of its own would have needed. `failed`: a restart would fail in the same way.

    Args:
        begun_from: the checkpoint of another run that it started from.
    """
    lost = f"nothing learned since {begun_from} is kept" if begun_from else "nothing learned is kept"
    if config.writes_checkpoints:
        return f"{lost}: no checkpoint was complete yet"
    again = "; --max-restarts N would have continued automatically" if config.nproc > 1 and not failed else ""
    return f"{lost}: --save-steps N would have kept it every N steps{again}"


def left_by(newest: str | None, begun_from: str | None, weights_only: bool) -> str:
    """Where the weights from before they became NaN are, and what can be done with them.

    Args:
        newest: the newest checkpoint in the run folder.
        begun_from: the checkpoint that the run resumed from.
        weights_only: whether the run's own checkpoints hold only weights.
    """
    start = newest or begun_from
    if start is None:
        return "There is no checkpoint to go back to."
    told = f"The newest checkpoint was written before: {start}\n"
    if weights_only and newest:
        return f"{told}It holds weights only. To use a lower learning rate: {exported(start)}."
    if begun_from:  # --resume has been given already
        return f"{told}A run that resumes from it keeps these options. To use a lower learning rate: {exported(start)}."
    return f"{told}--resume continues from it with the same options. To use a lower learning rate: {exported(start)}."
