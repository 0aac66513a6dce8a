"""Read checkpoints of torch.distributed.checkpoint (FSDP2, Accelerate)."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardproof.checkpoint.contents import MODEL, STATE
from shardproof.checkpoint.foreign import Found, own_name, reason_of
from shardproof.checkpoint.saving import told_plainly
from shardproof.errors import CheckpointError


class _Reading(DefaultLoadPlanner):
    """Reads values without executing them; `lost` are those that would be executed."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.lost: list[str] = []

    def load_bytes(self, read_item: Any, value: Any) -> None:
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError:
            self.lost.append(name)


def distributed_folders(source: Path) -> list[Path]:
    """The torch.distributed.checkpoint folders in `source`: itself, or those Accelerate keeps there.

    Raises:
        CheckpointError: one of them is incomplete.
    """
    if (source / ".metadata").is_file():
        return [source]
    folders = sorted({file.parent for pattern in ("*.distcp", "*/*.distcp") for file in source.glob(pattern)})
    for folder in folders:
        if not (folder / ".metadata").is_file():
            raise CheckpointError(
                f"{folder} is incomplete: .metadata, which is written last and describes the other files, is missing."
            )
    return sorted({*folders, *(file.parent for file in source.glob("*/.metadata"))})


def read_distributed(folders: list[Path], scratch: Path) -> Found:
    """Read checkpoints of FSDP2 and of anything else that saves state dicts with torch.distributed.checkpoint.

    Args:
        scratch: a folder for tensors in transit, as they may not fit into memory.

    Raises:
        CheckpointError: they hold no model.
    """
    found, entries = Found("torch.distributed.checkpoint"), {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for number, folder in enumerate(folders):
        more = _entries(folder, scratch / str(number), paths, found.lost)
        if twice := next((name for name in more if name in entries), None):
            raise CheckpointError(
                f"{folder.parent} holds more than one checkpoint, or states of more than one model: '{twice}' is in "
                f"{folder.name} and in another of {', '.join(one.name for one in folders)}. Name the folder of one, "
                "or move aside those that do not belong to it."
            )
        entries.update(more)
    optimizer = {name.partition(".param_groups.")[0] for name in entries if ".param_groups." in name}
    prefix = next(iter(optimizer), "")
    candidates = (f"{prefix.rpartition('.')[0]}.model.".lstrip("."), "model.")
    model = next((start for start in candidates if any(name.startswith(start) for name in entries)), None)
    if model is None or len(optimizer) > 1:
        raise CheckpointError(
            f"{folders[0]} holds no state dict under 'model', or more than one optimizer. It begins with "
            f"{', '.join(list(entries)[:5])}."
        )
    _check_not_bare(folders[0], entries, paths, model)
    groups: dict[str, dict[str, Any]] = {}
    values: dict[str, Any] = {}
    for name, value in entries.items():
        if name.startswith(model):
            found.add(MODEL + own_name(name.removeprefix(model)), value.shape, 0, value)
        elif prefix and name.startswith(f"{prefix}.state."):
            own, _, key = name.removeprefix(f"{prefix}.state.").rpartition(".")
            own = own_name(own)
            if isinstance(value, torch.Tensor) and value.dim():
                found.add(f"{STATE}{own}.{key}", value.shape, 0, value)
            else:
                found.scalars.setdefault(own, {})[key] = value
        elif prefix and name.startswith(f"{prefix}.param_groups."):
            group, _, key = name.removeprefix(f"{prefix}.param_groups.").partition(".")
            groups.setdefault(group, {})[key] = value
        else:
            values[name] = value
    nested = unflatten_state_dict(values, {name: paths.get(name, (name,)) for name in values})
    found.values = {name: _with_numbers(value) if paths else value for name, value in nested.items()}
    found.groups = _named_groups(groups, folders[0])
    return found


def _check_not_bare(folder: Path, entries: dict[str, Any], paths: dict[str, Any], model: str) -> None:
    """Raise CheckpointError for a top-level state dict in which only some names begin with `model.`."""
    tensors = [name for name, value in entries.items() if isinstance(value, torch.Tensor)]
    bare = [name for name in tensors if len(paths.get(name, ())) == 1]
    beside = next((name for name in bare if not name.startswith(model)), None)
    if beside and any(name.startswith(model) for name in bare):
        raise CheckpointError(
            f"{folder} holds a model's tensors at the top level ('{beside}' next to those under '{model}'), where they "
            "cannot be told from other values. Save {'model': get_model_state_dict(model)} where it was written."
        )


def _named_groups(groups: dict[str, dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Raises CheckpointError if the checkpoint does not say which parameter is which, or which ones make up a group."""
    problem = ""
    if not all(number.isdecimal() for number in groups):
        problem = "the groups of the optimizer (flatten_optimizer_state_dict=True)"
    elif not all(isinstance(name, str) for group in groups.values() for name in group.get("params", [None])):
        problem = "the names of its parameters (optimizer.state_dict() numbers them)"
    if problem:
        raise CheckpointError(
            f"{folder} was saved without {problem}. Load it where it was written, and save "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer) under 'optimizer'."
        )
    for group in groups.values():
        group["params"] = [own_name(name) for name in group["params"]]
    return [groups[number] for number in sorted(groups, key=int)]


def _with_numbers(value: Any) -> Any:
    """Restore the numeric keys of dicts (a scheduler's milestones), which are saved as strings."""
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    if not isinstance(value, dict):
        return value
    numbers = all(isinstance(key, str) and re.fullmatch(r"0|-?[1-9]\d*", key) for key in value)
    return {int(key) if numbers else key: _with_numbers(item) for key, item in value.items()}


def _entries(folder: Path, scratch: Path, paths: dict[str, Any], lost: list[str]) -> dict[str, Any]:
    """Tensors and values by name. Adds their paths in the saved object to `paths`, and values not read to `lost`."""
    scratch.mkdir(parents=True)
    reader, planner = dcp.FileSystemReader(folder), _Reading()
    with _readable(folder):
        metadata = reader.read_metadata()
    entries: dict[str, Any] = {}
    for place, (name, meta) in enumerate(metadata.state_dict_metadata.items()):
        entries[name] = None
        if isinstance(meta, TensorStorageMetadata):
            entries[name] = _on_disk(scratch / str(place), meta.size, meta.properties.dtype)
    with _readable(folder), told_plainly():
        dcp.load(entries, storage_reader=reader, planner=planner, no_dist=True)
    paths |= metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    lost += planner.lost
    return {name: value for name, value in entries.items() if name not in planner.lost}


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{folder} cannot be read: {reason_of(error)}.") from error


def _on_disk(file: Path, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor backed by a file."""
    if not shape.numel() or not shape:
        return torch.empty(shape, dtype=dtype)
    with file.open("wb") as made:  # reserves the room: writing to mapped memory on a full disk kills the process
        os.posix_fallocate(made.fileno(), 0, shape.numel() * dtype.itemsize)
    return torch.from_file(str(file), shared=True, size=shape.numel(), dtype=dtype).view(shape)
