"""The files of a model's weights, as far as this machine has them, and their tensors."""

from __future__ import annotations

import json
import math
import pickle
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = "pytorch_model.bin", "pytorch_model.bin.index.json"
TENSORS, VALUES = 64, 256  # sampled from a model, and from each tensor


def sample_of(name_or_path: str) -> str | None:
    """A checksum of sampled values of a model's weights. It does not depend on their location or on how they are split
    into files, and changes if the model was trained further, cast, or saved under other names. None if they are not on
    this machine."""
    from safetensors import SafetensorError

    try:
        found = files_of(name_or_path, local_files_only=True)
        names = sorted(found)[:: math.ceil(len(found) / TENSORS) or 1]
        of_files: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            of_files[found[name]].append(name)
        few = {name: part for file in of_files for name, part in _few(file, of_files[file])}
    except (OSError, SafetensorError, AttributeError, ValueError, LookupError):  # loading will report what is wrong
        return None
    return f"{zlib.crc32(b''.join(few[name] for name in names)):08x}" if names else None


def files_of(name_or_path: str, **how: bool) -> dict[str, Path]:
    """Each tensor of a model with its file, as far as this machine has the indexes."""
    for whole, index in ((WEIGHTS, INDEX), PICKLED):  # in transformers' order of preference
        for name in (whole, index):
            file = cached(name_or_path, name, **how)
            if file is not None:
                return {tensor: file.with_name(part) for tensor, part in weight_map(file.parent, whole, index).items()}
    return {}


def read(file: Path, names: list[str]) -> Iterator[tuple[str, Any]]:
    """Read these tensors of a file."""
    from safetensors import safe_open

    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as content:
            yield from ((name, content.get_tensor(name)) for name in names)
    else:
        tensors = _unpickled(file)
        yield from ((name, tensors[name].contiguous().clone()) for name in names)  # they may share memory


def _few(file: Path, names: list[str]) -> Iterator[tuple[str, bytes]]:
    """The dtype of each of these tensors and some values from its middle: the first rows of token tables are often
    never trained."""
    import torch
    from safetensors import safe_open

    def of(name: str, tensor: Any, shape: Sequence[int]) -> tuple[str, bytes]:
        if 0 in shape:
            return name, name.encode()
        few = tensor[(*(size // 2 for size in shape[:-1]), slice(VALUES))] if shape else tensor[...]
        return name, f"{name} {few.dtype} ".encode() + bytes(few.reshape(-1).contiguous().view(torch.uint8).numpy())

    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as content:
            slices = {name: content.get_slice(name) for name in names}
            yield from (of(name, part, part.get_shape()) for name, part in slices.items())
    else:
        tensors = _unpickled(file)
        yield from (of(name, tensors[name], tensors[name].shape) for name in names)


def _unpickled(file: Path) -> dict[str, Any]:
    """The tensors of a torch file, read lazily if its format allows."""
    import torch

    with file.open("rb") as content:
        zipped = content.read(2) == b"PK"
    try:
        return dict(torch.load(file, map_location="cpu", mmap=zipped, weights_only=True))
    except (RuntimeError, EOFError, LookupError, pickle.UnpicklingError) as error:
        raise OSError(f"{file} cannot be read: {error}") from error


def cached(name_or_path: str, name: str, **how: bool) -> Any:
    """A file of a folder or of a model on the hub; None also if the folder is gone, or the hub cannot be reached."""
    from transformers.utils import cached_file

    quiet = dict.fromkeys((f"_raise_exceptions_for_{what}" for what in ("missing_entries", "connection_errors")), False)
    try:
        found = cached_file(name_or_path, name, **quiet, **how)
    except OSError:
        return None
    return None if found is None else Path(found)


def weight_map(folder: Path, whole: str = WEIGHTS, index: str = INDEX) -> dict[str, str]:
    """Each tensor of a folder with the name of its file, from the index or header alone."""
    from safetensors import safe_open

    if (folder / whole).is_file():
        if not whole.endswith(".safetensors"):
            return dict.fromkeys(_unpickled(folder / whole), whole)
        with safe_open(folder / whole, "pt") as content:
            return dict.fromkeys(content.keys(), whole)
    if not (folder / index).is_file():
        return {}
    return dict(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"])
