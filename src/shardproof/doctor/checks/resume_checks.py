"""Checks of the checkpoint that a run resumes from: whether it belongs to these rows and this model."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardproof.checkpoint.contents import compare, plain_parts
from shardproof.checkpoint.manifest import Manifest
from shardproof.doctor.checks.check import Check
from shardproof.errors import CheckpointError, ConfigError
from shardproof.train.options.config import Batch, RunConfig
from shardproof.train.resume import AUTO, at_its_end, check_order, order_of, starts
from shardproof.train.rows.dealt import other_processes
from shardproof.train.rows.media import other_parts

NAME = "checkpoint"


def rows(config: RunConfig, batch: Batch, found: Any, encoded: Any, processing: Any = None) -> list[Check]:
    """Whether the rows, their order, the optimizer and the handling of files are those of the run that wrote it."""
    begin = starts(config)
    if not begin:
        return []
    try:
        saved = check_order(begin[0], order_of(config, found, len(encoded), batch.whole), found)
    except ConfigError as error:
        cause = "The run would be refused."
        return [Check("data", NAME, "fail", " ".join(str(error).split()), cause, "--resume, or the options named")]
    if told := [*other_processes(saved, begin[0], config, batch), *other_parts(begin[0], processing)]:
        return [Check("data", NAME, "warn", " ".join(told), "The run would resume, but with different results.")]
    return [Check("data", NAME, "ok", f"{begin[0]} was written by a run on these rows")]


def ended(config: RunConfig, steps: int) -> list[Check]:
    """Whether it is already at the end of a run of this many steps."""
    begin = starts(config)
    told = at_its_end(begin[0], steps, config) if begin else ""
    return [Check("data", NAME, "warn", told, "The run would only write its weights again.")] if told else []


def weights(config: RunConfig, model: nn.Module) -> list[Check]:
    """Whether it holds this model's parts and adapters, in these shapes."""
    begin = starts(config)
    if not begin:
        return []
    problems = []
    for start in begin:
        try:
            manifest = Manifest.read(start)
        except CheckpointError as error:
            problems.append(str(error))
            if config.resume == AUTO:
                continue  # the previous one is used instead
            break
        try:
            compare(plain_parts(model), manifest, start)
        except CheckpointError as error:
            cause = "The run would fail to load it."
            option = "--resume with a run of this model, or --model and --tuner as in that run"
            return [Check("model", NAME, "fail", str(error), cause, option)]
        if problems:
            cause = "The newest one is damaged, so the one before it is used."
            return [Check("model", NAME, "warn", problems[0], cause)]
        return [Check("model", NAME, "ok", f"{start} belongs to this model")]
    return [Check("model", NAME, "fail", problems[0], "The run would fail to load it.", "--resume")]
