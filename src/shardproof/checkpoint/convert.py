"""Convert checkpoints of other engines into ours, so that a run can move over."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from shardproof.checkpoint.api import LOCAL, OPTIMIZER, USER
from shardproof.checkpoint.folder import UNFINISHED, Aside
from shardproof.checkpoint.foreign import Found, read_pickle
from shardproof.checkpoint.from_deepspeed import deepspeed_folder, read_deepspeed
from shardproof.checkpoint.from_distributed import distributed_folders, read_distributed
from shardproof.checkpoint.manifest import MANIFEST, Manifest, Tensor
from shardproof.checkpoint.parts import Save
from shardproof.checkpoint.saving import told_plainly
from shardproof.checkpoint.storage import Writer, dtype_name
from shardproof.checkpoint.values import to_bytes
from shardproof.errors import CheckpointError

TRAINER_STATE = "trainer_state.json"
SCHEDULERS = ("scheduler.pt", "scheduler.bin")  # transformers' Trainer, Accelerate


def convert(source: str | os.PathLike[str], folder: str | os.PathLike[str]) -> tuple[Found, list[str]]:
    """Convert another engine's checkpoint into one of ours, in this process only.

    It reads DeepSpeed's ZeRO 1, 2 and 3 (a folder with `latest`, or the one it names) and the format of
    torch.distributed.checkpoint (FSDP2, Accelerate's `save_state`), also inside a `checkpoint-N` of transformers'
    Trainer, whose state and scheduler are kept. Tensors are not held in memory. Random states are not converted.

    Returns: what was found, and the names of values that cannot be kept.

    Raises:
        CheckpointError: `source` is none of these or damaged, or `folder` exists.
    """
    where = Path(source).expanduser()
    target = Path(os.path.abspath(Path(folder).expanduser()))
    try:
        return _convert(where, target)
    except OSError as error:  # the disk is full, read-only, or gone
        place = f"{error.filename}: " if error.filename else ""
        raise CheckpointError(f"{where} cannot be converted to {target}: {place}{error.strerror or error}.") from error


def _convert(where: Path, target: Path) -> tuple[Found, list[str]]:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists already. Name another folder.")
    deepspeed, distributed = deepspeed_folder(where), distributed_folders(where)
    if (where / MANIFEST).is_file():
        raise CheckpointError(f"{where} is already a shardproof checkpoint: shardproof.load reads it.")
    if deepspeed is None and not distributed:
        other = "is a file" if where.exists() else "does not exist"
        what = "holds no checkpoint that can be converted" if where.is_dir() else other
        raise CheckpointError(
            f"{where} {what}. Supported are folders with *_optim_states.pt (DeepSpeed ZeRO, or the folder with "
            "'latest') and with .metadata (FSDP2, Accelerate's save_state)."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=target.parent) as scratch:
        found = read_deepspeed(deepspeed) if deepspeed else read_distributed(distributed, Path(scratch))
        files = _of_trainer(where, found)
        return found, [*found.lost, *_write(target, found, files)]


def _of_trainer(source: Path, found: Found) -> dict[str, bytes]:
    """What a trainer keeps along with the engine's files: the scheduler and the state file of transformers' Trainer."""
    for name in SCHEDULERS:
        if (source / name).is_file():
            found.values["scheduler"] = read_pickle(source / name)
    if not (source / TRAINER_STATE).is_file():
        return {}
    content = (source / TRAINER_STATE).read_bytes()
    try:
        step = int(json.loads(content)["global_step"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{source / TRAINER_STATE} cannot be read: {error}.") from error
    found.values["progress"] = {"losses": [0.0], "last_logged": step, "kept": {"tokens": 0}}
    return {TRAINER_STATE: content}


def _write(target: Path, found: Found, files: dict[str, bytes]) -> list[str]:
    values: dict[str, bytes] = {}
    lost = []
    for name, value in found.values.items():
        try:
            values[USER + name] = to_bytes(name, value)
        except CheckpointError:
            lost.append(name)
    if found.groups:
        shared = {"groups": found.groups, "scalars": found.scalars}
        values |= {OPTIMIZER: to_bytes("optimizer", shared), LOCAL: to_bytes("optimizer", {})}
    manifest = Manifest(time.time(), 0, 1, frozen_unknown=found.frozen_unknown)
    for part in found.parts:
        manifest.tensors.setdefault(part.name, Tensor(list(part.shape), dtype_name(part.local.dtype)))
    aside = Aside(target)
    try:
        writer = Writer(target.with_name(target.name + UNFINISHED), aside, manifest, files)
        with told_plainly():
            dcp.save({}, storage_writer=writer, planner=Save(found.parts, values), no_dist=True)
    except BaseException:
        aside.discard()
        raise
    return lost


def described(found: Found) -> list[tuple[str, Any]]:
    """What was converted, as rows of a table."""
    names = {part.name for part in found.parts if part.name.startswith("model.")}
    state = {part.name.rpartition(".")[2] for part in found.parts if not part.name.startswith("model.")}
    shown = f"{len(found.groups)} group(s), {', '.join(sorted(state))}" if found.groups else "none"
    model = f"{len(names)} tensors{', none of them frozen' if found.frozen_unknown else ''}"
    return [("read", found.kind), ("model", model), ("optimizer", shown)]
