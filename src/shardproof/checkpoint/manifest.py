"""The manifest of a checkpoint: what it holds and where. It is written last, which makes the checkpoint complete.

It is JSON, so that reading a checkpoint unpickles nothing. The `.metadata` of torch.distributed.checkpoint is also
written, for other tools.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shardproof.errors import CheckpointError

MANIFEST = "checkpoint.json"
FORMAT = 1
_HEAD, _MIDDLE, _TAIL = '{"crc32":', ',"content":', "}\n"


@dataclass
class Piece:
    """The location of some bytes, and their checksum."""

    file: str
    at: int
    size: int
    crc32: int


@dataclass
class Tensor:
    """A tensor in the checkpoint: flattened, in chunks of consecutive elements.

    Attributes:
        shape: of the unsharded tensor.
        chunks: for each, the first element, the number of elements, and the location.
    """

    shape: list[int]
    dtype: str
    chunks: list[tuple[int, int, Piece]] = field(default_factory=list)


@dataclass
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        created: seconds since 1970.
        left_out: frozen parameters that are not in the checkpoint, and their shapes.
        frozen_unknown: frozen parameters may be missing; another engine left them out without naming them.
        values: everything but tensors, by name; `name@rank` where ranks differ.
        files: the size of each in bytes.
        sums: checksums (crc32) of files that are read as a whole.
    """

    created: float
    stage: int
    world_size: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    left_out: dict[str, list[int]] = field(default_factory=dict)
    values: dict[str, Piece] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    sums: dict[str, int] = field(default_factory=dict)
    frozen_unknown: bool = False
    format: int = FORMAT

    def place(self, name: str, rank: int) -> str | None:
        """The entry of the value `name` for a rank: one for all ranks, its own, or rank 0's."""
        return next((place for place in (name, f"{name}@{rank}", f"{name}@0") if place in self.values), None)

    def write(self, folder: Path) -> None:
        content = json.dumps(asdict(self), separators=(",", ":"))
        with (folder / MANIFEST).open("w", encoding="utf-8") as file:
            file.write(f"{_HEAD}{zlib.crc32(content.encode())}{_MIDDLE}{content}{_TAIL}")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises CheckpointError if there is no complete checkpoint, or a file is missing or truncated."""
        path = folder / MANIFEST
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            what = f"it has no {MANIFEST}" if folder.is_dir() else "there is no such folder"
            raise CheckpointError(f"{folder} is not a complete checkpoint: {what}.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}.") from error
        manifest = cls._parse(text, path)
        for name, size in manifest.files.items():
            file = folder / name
            there = file.stat().st_size if file.is_file() else -1
            if there != size:
                what = "is missing" if there < 0 else f"has {there:,} bytes instead of {size:,}"
                raise CheckpointError(f"{file} {what}: the checkpoint is damaged.")
            if name in manifest.sums and zlib.crc32(file.read_bytes()) != manifest.sums[name]:
                raise CheckpointError(f"{file} is damaged: its checksum is wrong.")
        return manifest

    @classmethod
    def _parse(cls, text: str, path: Path) -> Manifest:
        head, _, content = text.removesuffix(_TAIL).partition(_MIDDLE)
        if head != f"{_HEAD}{zlib.crc32(content.encode())}":
            raise CheckpointError(f"{path} is damaged: its checksum is wrong.")
        raw = json.loads(content)
        if raw["format"] > FORMAT:
            raise CheckpointError(f"{path.parent} was written by a later version of shardproof: update this one.")
        for tensor in raw["tensors"].values():
            tensor["chunks"] = [(first, count, Piece(**piece)) for first, count, piece in tensor["chunks"]]
        raw["tensors"] = {name: Tensor(**tensor) for name, tensor in raw["tensors"].items()}
        raw["values"] = {name: Piece(**piece) for name, piece in raw["values"].items()}
        return cls(**raw)
