"""Checks of the machine: versions, devices, room on the disk."""

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
    """The versions of what we require, and of DeepSpeed if it is there."""
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
    """Whether what is installed is what we need."""
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
                "Releases of these libraries break each other; these are not the ones this was tested with.",
                f"pip install -U {packages}",
            )
        ]
    return [Check(AREA, "versions", "ok", shown)]


def some_text(wrong: list[str], needed: list[str]) -> str:
    return "; ".join([*wrong, *(f"{name} is not installed" for name in needed)])


def devices(nproc: int) -> list[Check]:
    """Whether there is an accelerator for each of so many processes on this machine, and a way to talk."""
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
    """What a run of so many steps leaves on the disk: the weights once more, and its checkpoints, each with two states
    of what is trained. Checkpoints of adapters hold nothing of their base. `epoch`: steps of a pass over the rows."""
    held = trainable if config.tuner != "full" else parameters
    dtype, each = saved_dtype(config, config.model), 2 if config.stochastic_rounding else 4
    weights = held * (each if dtype is None else dtype.itemsize)
    if not config.writes_checkpoints:
        return weights
    written = -(-steps // (config.checkpoint_steps or epoch))  # the last step is one, too
    if kept := config.kept_checkpoints:  # the next one is complete before the oldest goes
        written = min(written, kept + 1)
    state = 0 if config.save_only_model or config.optimizer == ADAFACTOR else 2 * each
    if config.optimizer == EIGHT_BITS:
        state //= each
    return weights + written * (each * held + state * trainable)


def checkpoints(config: RunConfig, steps: int, epoch: int) -> list[Check]:
    """When a run of so many steps writes some; a pass over the rows has `epoch` of them."""
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
    """Whether the folder of the run can be made and written to, without making it."""
    wanted = config.output_dir or "runs"
    place = nearest(wanted)
    if not place.is_dir():
        seen = f"{wanted} cannot be created: {place} is a file"
    elif not os.access(place, os.W_OK | os.X_OK):
        seen = f"{place} cannot be written to"
    else:
        return []
    return [Check(AREA, "output", "fail", seen, "The run would end before it begins.", "--output-dir")]


def nearest(folder: str) -> Path:
    """A folder, or what is there of the path to it."""
    place = Path(folder).expanduser().absolute()
    while not place.exists():
        place = place.parent
    return place


def disk(config: RunConfig, needed: int, free: int | None = None) -> list[Check]:
    """Whether what the run writes fits where it goes. `free`: bytes there, if known."""
    place = nearest(config.output_dir or "runs")
    free = shutil.disk_usage(place).free if free is None else free
    seen = f"{needed / 1e9:.2f} GB to write, {free / 1e9:.2f} GB free in {place}"
    limit = "--save-total-limit 1, or " if config.writes_checkpoints and config.save_total_limit != 1 else ""
    if free < needed:
        cause = "The disk fills up before the run ends, and everything trained by then is lost."
        if config.writes_checkpoints:
            cause = "The disk fills up before the run ends; it can resume from its newest complete checkpoint."
        return [Check(AREA, "disk", "fail", seen, cause, f"{limit}--output-dir on another disk")]
    if free < 2 * needed:
        cause = "Little space would be left."
        return [Check(AREA, "disk", "warn", seen, cause, f"{limit}--output-dir on another disk")]
    return [Check(AREA, "disk", "ok", seen)]
