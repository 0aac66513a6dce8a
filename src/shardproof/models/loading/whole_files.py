"""Whether the files of a model folder are complete, as far as that can be checked without reading weights."""

from __future__ import annotations

import json
from pathlib import Path

from shardproof.errors import ConfigError

ADAPTER = "adapter_config.json"  # PEFT's
OF_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_SAID = ("config.json", ADAPTER, "generation_config.json", "tokenizer_config.json", "*.index.json")


def check_whole_files(folder: Path) -> None:
    """Raise ConfigError for a folder with a file that was truncated or changed, or with adapters without weights.
    Imports nothing heavy."""
    for pattern in _SAID:
        for file in folder.glob(pattern):
            _check_json(file)
    for file in folder.glob("*.safetensors"):
        _check_safetensors(file)
    if (folder / ADAPTER).is_file() and not any((folder / name).is_file() for name in OF_ADAPTERS):
        raise ConfigError(f"{folder} has no {OF_ADAPTERS[0]} next to its {ADAPTER}. Was it only partly copied?")


def _check_json(file: Path) -> None:
    try:
        why = "" if isinstance(json.loads(file.read_text(encoding="utf-8")), dict) else "it is not a JSON object"
    except (OSError, ValueError) as error:
        why = str(getattr(error, "strerror", None) or error)
    if why:
        raise ConfigError(
            f"{file} cannot be read: {why}.\nIt was truncated or changed: replace it with a complete copy."
        )


def _check_safetensors(file: Path) -> None:
    """The first eight bytes are the length of the header, which says where tensors end; for a text file in place of
    weights, that is a huge number."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start == b"version ":
            raise ConfigError(f"{file} is a Git LFS pointer, not the weights.\nFetch them with: git lfs pull")
        length = int.from_bytes(start, "little")
        header = stream.read(length) if len(start) == 8 and length <= size - 8 else b""
    try:
        tensors = json.loads(header)
        ends = [part["data_offsets"][1] for name, part in tensors.items() if name != "__metadata__"]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(f"{file} is truncated, or not a safetensors file.") from None
    if size < (whole := 8 + length + max(ends, default=0)):
        raise ConfigError(f"{file} is truncated: it has {size:,} bytes of {whole:,}. Copy it again.")
