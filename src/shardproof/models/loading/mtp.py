"""Layers for multi-token prediction (MTP). Weight files contain them for servers that draft with them; transformers
leaves them out, and trains and saves a model without them. They are copied, unchanged, into the saved model."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from shardproof.models.loading.weight_files import INDEX, WEIGHTS, cached, files_of, read, weight_map

OWN, FIRST = "mtp.safetensors", "model-00001-of-00001.safetensors"
# Suffixes of token tables, and the tables of the model with the same rows.
TABLES = {
    "embed_tokens.weight": ("embed_tokens.weight",),
    "shared_head.head.weight": ("lm_head.weight", "embed_tokens.weight"),
}
NAMED, COUNTED = re.compile(r"(^|[._])mtp"), re.compile(r"(^|\.)layers\.(\d+)\.")
PLAIN = ("float64", "float32", "float16", "bfloat16")  # dtypes of models that are not quantised


def carry_mtp(model: Any, folder: str | Path, dtype: Any = None) -> int:
    """Copy the MTP layers from the files that a model was loaded from to `folder`, where it has just been saved.

    Args:
        model: a transformers model without adapters, which knows the folder or hub id of its files.
        dtype: the dtype to write them in; None keeps theirs.

    Returns:
        The number of tensors added: 0 if the files have none, or quantised ones, or if the model generates no tokens.

    Raises:
        OSError, SafetensorError: they cannot be read or written. The model in `folder` is unchanged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    target = Path(folder)
    kept: dict[str, Any] = {}
    for file, names in _of_files(model).items():
        for name, value in read(file, names):
            if str(value.dtype).removeprefix("torch.") not in PLAIN:
                return 0
            kept[name] = value if dtype is None else value.to(dtype)
    written = weight_map(target)
    kept = {name: value for name, value in kept.items() if name not in written}
    if not kept:
        return 0
    kept = {name: _grown(target, written, name, value) for name, value in kept.items()}
    aside = target / f"{INDEX}.unfinished"
    try:
        save_file(kept, target / OWN, metadata={"format": "pt"})
        total = sum(_bytes(target / name) for name in {*written.values(), OWN})
        one = (target / WEIGHTS).is_file()  # readers take a file with this name to be complete
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
    """A token table, extended by rows that the model in `folder` has gained since, taken from the model's own table."""
    import torch
    from safetensors import safe_open

    ends = next((own for end, own in TABLES.items() if name.endswith(f".{end}")), ())
    found = next((same for end in ends if (same := [tensor for tensor in written if tensor.endswith(end)])), [])
    if len(found) != 1:  # ambiguous: a part of the model has its own tokens
        return value
    with safe_open(folder / written[found[0]], "pt") as content:
        rows, had = content.get_slice(found[0]), len(value)
        many, width = rows.get_shape()
        fits = many > had and width == value.shape[1]
        return torch.cat([value, rows[had:].to(value.dtype)]) if fits else value


def _of_files(model: Any) -> dict[Path, list[str]]:
    """The names of MTP tensors by file: tensors that the model's class does not read and that look like MTP."""
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
    for name, file in files_of(model.name_or_path).items():
        if further(name):
            found[file].append(name)
    files = [file if file.is_file() else cached(model.name_or_path, file.name) for file in found]
    return {} if None in files else dict(zip(files, found.values(), strict=True))  # all of them or none


def _bytes(file: Path) -> int:
    """The size of its tensors."""
    with file.open("rb") as content:
        return file.stat().st_size - 8 - int.from_bytes(content.read(8), "little")
