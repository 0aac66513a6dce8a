"""Checks of the machine: versions, devices, room on the disk."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from shardproof.doctor.check import Check, Status
from shardproof.train.config import RunConfig

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


def devices(config: RunConfig) -> list[Check]:
    """Whether there is an accelerator for each process, and a way to talk."""
    import torch
    import torch.distributed as dist

    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        backend = "gloo" if dist.is_gloo_available() else "none"
        status: Status = "ok" if backend == "gloo" or config.nproc == 1 else "fail"
        return [Check(AREA, "devices", status, f"CPU, {config.nproc} process(es), {backend}")]
    count = torch.accelerator.device_count()
    seen = f"{count} x {kind.type} for {config.nproc} process(es)"
    if count < config.nproc:
        return [Check(AREA, "devices", "fail", seen, "Two processes cannot share a device.", f"--nproc {count}")]
    return [Check(AREA, "devices", "ok", seen)]


def bytes_to_write(config: RunConfig, parameters: int, trainable: int) -> int:
    """What a run leaves on the disk: the weights once more, and each checkpoint with two states of what is trained."""
    weights = 4 * (trainable if config.tuner == "lora" else parameters)
    if not config.save_steps:
        return weights
    kept = (config.save_total_limit or 3) + 1  # the next one is complete before the oldest goes
    return weights + kept * (weights + 8 * trainable)


def disk(config: RunConfig, needed: int, free: int | None = None) -> list[Check]:
    """Whether what the run writes fits where it goes. `free`: bytes there, if known."""
    place = Path(config.output_dir or "runs").expanduser().absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free if free is None else free
    seen = f"{needed / 1e9:.2f} GB to write, {free / 1e9:.2f} GB free in {place}"
    if free < needed:
        cause = "The disk is full before the run is at its end; what was trained by then is lost."
        return [Check(AREA, "disk", "fail", seen, cause, "--output-dir on another disk, or --save-total-limit 1")]
    if free < 2 * needed:
        return [Check(AREA, "disk", "warn", seen, "There is little room beside it.", "--output-dir on another disk")]
    return [Check(AREA, "disk", "ok", seen)]
