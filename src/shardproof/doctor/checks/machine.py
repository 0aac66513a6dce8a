"""Checks of the machine: versions, devices, disk space."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from shardproof.doctor.checks.check import Check, Status
from shardproof.train.model.dtypes import saved_dtype
from shardproof.train.options.config import ADAFACTOR, EIGHT_BITS, RunConfig

if TYPE_CHECKING:
    from packaging.requirements import Requirement

AREA = "environment"


def installed() -> dict[str, str]:
    """The versions of required packages, and of DeepSpeed if it is installed."""
    found = {}
    for line in (*(importlib.metadata.requires("shardproof") or []), "deepspeed"):
        name = _requirement(line).name
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _requirement(line: str) -> Requirement:
    from packaging.requirements import Requirement as Parsed

    return Parsed(line.partition(";")[0])


def versions() -> list[Check]:
    """Whether the required packages are installed in suitable versions."""
    found, wrong, needed = installed(), [], []
    for line in importlib.metadata.requires("shardproof") or []:
        requirement = _requirement(line)
        extra = line.partition(";")[2]
        version = found.get(requirement.name)
        if version is None:
            if "extra" not in extra or "train" in extra:
                needed.append(str(requirement))
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} (needs {requirement.specifier})")
    shown = ", ".join(
        f"{name} {found[name]}" for name in ("torch", "transformers", "accelerate", "peft") if name in found
    )
    if wrong or needed:
        packages = " ".join([w.split(" ")[0] for w in wrong] + needed)
        return [
            Check(
                *(AREA, "versions", "fail", some_text(wrong, needed)),
                "Not all releases of these libraries work together; these were not tested.",
                f"pip install -U {packages}",
            )
        ]
    return [Check(AREA, "versions", "ok", shown)]


def some_text(wrong: list[str], needed: list[str]) -> str:
    return "; ".join([*wrong, *(f"{name} is not installed" for name in needed)])


def devices(nproc: int) -> list[Check]:
    """Whether there is an accelerator for each of `nproc` processes on this machine, and a backend to communicate."""
    import torch
    import torch.distributed as dist

    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        backend = "gloo" if dist.is_gloo_available() else "none"
        status: Status = "ok" if backend == "gloo" or nproc == 1 else "fail"
        return [Check(AREA, "devices", status, f"CPU, {nproc} process(es), {backend}")]
    count = torch.accelerator.device_count()
    seen = f"{count} x {kind.type} for {nproc} process(es)"
    if count < nproc:
        return [Check(AREA, "devices", "fail", seen, "Two processes cannot share a device.", f"--nproc {count}")]
    return [Check(AREA, "devices", "ok", seen)]


def bytes_to_write(config: RunConfig, parameters: int, trainable: int, steps: int, epoch: int) -> int:
    """The bytes that a run of this many steps writes to disk: the weights again, and its checkpoints, each with two
    optimizer states of the trained weights. Checkpoints of adapters do not hold their base. `epoch`: steps per pass
    over the rows."""
    held = trainable if config.tuner != "full" else parameters
    dtype, each = saved_dtype(config, config.model), 2 if config.stochastic_rounding else 4
    weights = held * (each if dtype is None else dtype.itemsize)
    if not config.writes_checkpoints:
        return weights
    written = -(-steps // (config.checkpoint_steps or epoch))  # the last step is saved, too
    if kept := config.kept_checkpoints:  # the next one is complete before the oldest is deleted
        written = min(written, kept + 1)
    state = 0 if config.save_only_model or config.optimizer == ADAFACTOR else 2 * each
    if config.optimizer == EIGHT_BITS:
        state //= each
    return weights + written * (each * held + state * trainable)


def checkpoints(config: RunConfig, steps: int, epoch: int) -> list[Check]:
    """When a run of this many steps writes checkpoints; a pass over the rows has `epoch` steps."""
    if not config.writes_checkpoints:
        return []
    every = config.checkpoint_steps or epoch
    if every < steps:
        last = ", and at the end" if steps % every else ""
        return [Check(AREA, "checkpoints", "ok", f"after every {every} of {steps} steps{last}")]
    seen = f"one, at the end of {steps} steps"
    if config.save_strategy == "epoch":
        return [Check(AREA, "checkpoints", "ok", seen)]
    cause = "A run that dies before its end has no checkpoint to resume from."
    return [Check(AREA, "checkpoints", "warn", seen, cause, f"--save-steps of less than {steps}")]


def output(config: RunConfig) -> list[Check]:
    """Whether the folder of the run can be created and written to, without creating it."""
    wanted = config.output_dir or "runs"
    place = nearest(wanted)
    if not place.is_dir():
        seen = f"{wanted} cannot be created: {place} is a file"
    elif not os.access(place, os.W_OK | os.X_OK):
        seen = f"{place} cannot be written to"
    else:
        return []
    return [Check(AREA, "output", "fail", seen, "The run would end before it starts.", "--output-dir")]


def nearest(folder: str) -> Path:
    """A folder, or the nearest existing part of the path to it."""
    place = Path(folder).expanduser().absolute()
    while not place.exists():
        place = place.parent
    return place


def disk(config: RunConfig, needed: int, free: int | None = None) -> list[Check]:
    """Whether the output of the run fits on its disk. `free`: bytes there, if known."""
    place = nearest(config.output_dir or "runs")
    free = shutil.disk_usage(place).free if free is None else free
    seen = f"{needed / 1e9:.2f} GB to write, {free / 1e9:.2f} GB free in {place}"
    limit = "--save-total-limit 1, or " if config.writes_checkpoints and config.save_total_limit != 1 else ""
    if free < needed:
        cause = "The disk would fill up before the run ends, and everything trained by then would be lost."
        if config.writes_checkpoints:
            cause = "The disk would fill up before the run ends; it could resume from its newest complete checkpoint."
        return [Check(AREA, "disk", "fail", seen, cause, f"{limit}--output-dir on another disk")]
    if free < 2 * needed:
        cause = "Little space would be left."
        return [Check(AREA, "disk", "warn", seen, cause, f"{limit}--output-dir on another disk")]
    return [Check(AREA, "disk", "ok", seen)]
