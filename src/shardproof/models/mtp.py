"""Layers that predict further tokens (MTP): in files of weights for servers that draft with them, and left out by
transformers, which trains and saves a model without. They go along with what is saved, as they were."""

from __future__ import annotations

import json
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = "pytorch_model.bin", "pytorch_model.bin.index.json"
OWN, FIRST = "mtp.safetensors", "model-00001-of-00001.safetensors"
# Tables of tokens, by the ends of their names, and which of a model are of the same rows.
TABLES = {
    "embed_tokens.weight": ("embed_tokens.weight",),
    "shared_head.head.weight": ("lm_head.weight", "embed_tokens.weight"),
}
NAMED, COUNTED = re.compile(r"(^|[._])mtp"), re.compile(r"(^|\.)layers\.(\d+)\.")
PLAIN = ("float64", "float32", "float16", "bfloat16")  # what a model that is not quantized is saved in


def carry_mtp(model: Any, folder: str | Path, dtype: Any = None) -> int:
    """Add the MTP layers of the files that a model was loaded from to `folder`, where it has just been saved.

    Args:
        model: of transformers, without adapters; it knows the folder, or the name on the hub, of its files.
        dtype: what they are written in; None keeps theirs.

    Returns:
        How many tensors were added: 0 if the files have none, or have them quantized, or the model writes no tokens.

    Raises:
        OSError, SafetensorError: they cannot be read or written. The model in `folder` is as it was.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    target = Path(folder)
    kept: dict[str, Any] = {}
    for file, names in _of_files(model).items():
        for name, value in _read(file, names):
            if str(value.dtype).removeprefix("torch.") not in PLAIN:
                return 0
            kept[name] = value if dtype is None else value.to(dtype)
    written = _weight_map(target)
    kept = {name: value for name, value in kept.items() if name not in written}
    if not kept:
        return 0
    kept = {name: _grown(target, written, name, value) for name, value in kept.items()}
    aside = target / f"{INDEX}.unfinished"
    try:
        save_file(kept, target / OWN, metadata={"format": "pt"})
        total = sum(_bytes(target / name) for name in {*written.values(), OWN})
        one = (target / WEIGHTS).is_file()  # a file of this name would be taken for all there is
        written = (dict.fromkeys(written, FIRST) if one else written) | dict.fromkeys(kept, OWN)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(written.items()))}
        aside.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError):
        for file in (target / OWN, aside):
            file.unlink(missing_ok=True)
        raise
    aside.replace(target / INDEX)
    if one:
        (target / WEIGHTS).rename(target / FIRST)
    return len(kept)


def _grown(folder: Path, written: dict[str, str], name: str, value: Any) -> Any:
    """A table of tokens with the rows that the model, which is in `folder`, has got since: they are the model's own."""
    import torch
    from safetensors import safe_open

    ends = next((own for end, own in TABLES.items() if name.endswith(f".{end}")), ())
    found = next((same for end in ends if (same := [tensor for tensor in written if tensor.endswith(end)])), [])
    if len(found) != 1:  # nobody knows which, of a model with a part that has tokens of its own
        return value
    with safe_open(folder / written[found[0]], "pt") as content:
        rows, had = content.get_slice(found[0]), len(value)
        many, width = rows.get_shape()
        fits = many > had and width == value.shape[1]
        return torch.cat([value, rows[had:].to(value.dtype)]) if fits else value


def _of_files(model: Any) -> dict[Path, list[str]]:
    """The names of MTP tensors by file: those that the model's class does not read, if they look like that."""
    unread = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    writes = model.get_output_embeddings() is not None and not hasattr(model, "score")  # of models/scorers.py
    if not unread or not writes:
        return {}
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", 0)

    def further(name: str) -> bool:
        counted = COUNTED.search(name)
        beyond = counted is not None and int(counted[2]) >= depth
        return (beyond or NAMED.search(name) is not None) and any(pattern.search(name) for pattern in unread)

    found: dict[Path, list[str]] = defaultdict(list)
    for name, file in _source(model.name_or_path).items():
        if further(name):
            found[file].append(name)
    files = [file if file.is_file() else _cached(model.name_or_path, file.name) for file in found]
    return {} if None in files else dict(zip(files, found.values(), strict=True))  # not a part of them


def _source(name_or_path: str) -> dict[str, Path]:
    """Each tensor of a model with its file, as far as this machine has the lists of them."""
    for whole, index in ((WEIGHTS, INDEX), PICKLED):  # as transformers prefers them
        for name in (whole, index):
            file = _cached(name_or_path, name)
            if file is not None:
                return {tensor: file.with_name(part) for tensor, part in _weight_map(file.parent, whole, index).items()}
    return {}


def _read(file: Path, names: list[str]) -> Iterator[tuple[str, Any]]:
    """These tensors of a file."""
    from safetensors import safe_open

    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as content:
            yield from ((name, content.get_tensor(name)) for name in names)
    else:
        tensors = _unpickled(file)
        yield from ((name, tensors[name].contiguous().clone()) for name in names)  # they may share memory


def _unpickled(file: Path) -> dict[str, Any]:
    """The tensors of a file of torch's, read from it when they are looked at, where it is of a kind that can be."""
    import torch

    with file.open("rb") as content:
        zipped = content.read(2) == b"PK"
    try:
        return dict(torch.load(file, map_location="cpu", mmap=zipped, weights_only=True))
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise OSError(f"{file} cannot be read: {error}") from error


def _cached(name_or_path: str, name: str) -> Any:
    """A file of a folder or of a model on the hub, or None: also if the folder is gone, or the hub cannot be asked."""
    from transformers.utils import cached_file

    quiet = dict.fromkeys((f"_raise_exceptions_for_{what}" for what in ("missing_entries", "connection_errors")), False)
    try:
        found = cached_file(name_or_path, name, **quiet)
    except OSError:
        return None
    return None if found is None else Path(found)


def _weight_map(folder: Path, whole: str = WEIGHTS, index: str = INDEX) -> dict[str, str]:
    from safetensors import safe_open

    if (folder / whole).is_file():
        if whole != WEIGHTS:
            return dict.fromkeys(_unpickled(folder / whole), whole)
        with safe_open(folder / WEIGHTS, "pt") as content:
            return dict.fromkeys(content.keys(), WEIGHTS)
    if not (folder / index).is_file():
        return {}
    return dict(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"])


def _bytes(file: Path) -> int:
    """Of its tensors."""
    with file.open("rb") as content:
        return file.stat().st_size - 8 - int.from_bytes(content.read(8), "little")
