"""Full weights in safetensors files, written by all ranks: each writes its ranges, and nothing is gathered.

In a safetensors file, a tensor is a range of bytes at an offset given in the header. A rank holds a range of each
flattened parameter, and so a range of these bytes, which it writes at their place.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from shardproof.checkpoint.elsewhere import END, Post
from shardproof.checkpoint.parts import CHUNK, Part, to_write
from shardproof.checkpoint.saving import Channel
from shardproof.errors import CheckpointError
from shardproof.models.loading.weight_files import INDEX

_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@dataclass
class _File:
    """One file: its header, and the offset and dtype of each tensor."""

    name: str
    header: bytes
    places: dict[str, int]
    dtypes: dict[str, torch.dtype]
    size: int


def can_write(dtypes: Sequence[torch.dtype]) -> bool:
    """Whether safetensors supports all of these."""
    return all(dtype in _NAMES for dtype in dtypes)


def write_weights(
    channel: Channel, folder: Path, parts: list[Part], max_bytes: int, dtype: torch.dtype | None = None
) -> None:
    """Write `model.safetensors`, or several `model-I-of-N.safetensors` with an index, into a folder, replacing those
    that are there.

    Args:
        folder: the path given on rank 0 counts.
        parts: this rank's parts of each tensor, under their names in the files, in the same order on all ranks.
        max_bytes: the largest size of a file, unless a single tensor is larger.
        dtype: the dtype to write floating-point numbers in; None keeps theirs.

    Raises:
        CheckpointError: on all ranks, if one cannot write.
    """
    dtypes = {part.name: dtype if dtype and part.local.is_floating_point() else part.local.dtype for part in parts}
    files = _plan(parts, dtypes, max_bytes)
    folder = Path(channel.everyone(os.path.abspath(folder))[0])  # ranks may have been started in different folders
    channel.agree(lambda: _make(folder, files, parts) if channel.rank == 0 else None)
    posts = channel.posts(channel.blind(folder))
    mine = {part.name: part for part in to_write(parts, channel.rank, channel.size)}
    channel.agree(lambda: _send(posts[0], files, mine) if 0 in posts else _fill(folder, files, mine, posts.values()))


def _plan(parts: list[Part], dtypes: dict[str, torch.dtype], max_bytes: int) -> list[_File]:
    groups: list[list[Part]] = [[]]
    size = 0
    for part in parts:
        nbytes = part.numel * dtypes[part.name].itemsize
        if groups[-1] and size + nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += nbytes
    count = len(groups)
    names = (
        ["model.safetensors"]
        if count == 1
        else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    )
    return [_layout(name, group, dtypes) for name, group in zip(names, groups, strict=True)]


def _layout(name: str, parts: list[Part], all_dtypes: dict[str, torch.dtype]) -> _File:
    dtypes = {part.name: all_dtypes[part.name] for part in parts}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for part in sorted(parts, key=lambda part: -dtypes[part.name].itemsize):  # so that each is aligned to its dtype
        start, end = end, end + part.numel * dtypes[part.name].itemsize
        kind = _NAMES[dtypes[part.name]]
        header[part.name] = {"dtype": kind, "shape": list(part.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    places = {part.name: begin + header[part.name]["data_offsets"][0] for part in parts}
    return _File(name, len(text).to_bytes(8, "little") + text, places, dtypes, begin + end)


def _make(folder: Path, files: list[_File], parts: list[Part]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():  # left by another split; they would be read instead
        if _OURS.fullmatch(old.name):
            old.unlink()
    for file in files:
        with (folder / file.name).open("wb") as out:
            out.write(file.header)
            out.truncate(file.size)
    if len(files) > 1:
        total = sum(file.size - len(file.header) for file in files)
        index = {"metadata": {"total_size": total}, "weight_map": {name: f.name for f in files for name in f.places}}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / INDEX).write_text(text, encoding="utf-8")


Piece = tuple[int, int, memoryview]  # the number of a file, the offset in it, and the bytes


def _pieces(files: list[_File], mine: dict[str, Part]) -> Iterator[Piece]:
    for number, file in enumerate(files):
        for part in (mine[name] for name in file.places if name in mine):
            dtype = file.dtypes[part.name]
            at = file.places[part.name] + part.first * dtype.itemsize
            for piece in part.local.split(CHUNK):
                data = memoryview(piece.detach().cpu().to(dtype).contiguous().view(torch.uint8).numpy())
                yield number, at, data
                at += len(data)


def _send(post: Post, files: list[_File], mine: dict[str, Part]) -> None:
    """Send what this rank would write to rank 0."""
    try:
        for number, at, data in _pieces(files, mine):
            post.send(number, at, data=data)
    finally:
        post.end()


def _sent(post: Post) -> Iterator[Piece]:
    while (packet := post.receive())[0] != END:
        yield packet[0], packet[1], packet[3]


def _fill(folder: Path, files: list[_File], mine: dict[str, Part], posts: Collection[Post] = ()) -> None:
    """Write this rank's parts, and those that others send."""
    problems = []
    for pieces in (_pieces(files, mine), *map(_sent, posts)):
        try:
            _write(folder, files, pieces)
        except (OSError, CheckpointError) as error:
            problems.append(error)
            for _ in pieces:  # the senders must not wait forever
                pass
    for problem in problems:
        raise problem


def _write(folder: Path, files: list[_File], pieces: Iterable[Piece]) -> None:
    sums: dict[int, list[tuple[int, int, int]]] = {}
    with contextlib.ExitStack() as stack:
        outs: dict[int, IO[bytes]] = {}
        for number, at, data in pieces:
            if number not in outs:
                outs[number] = stack.enter_context((folder / files[number].name).open("r+b", buffering=0))
            sums.setdefault(number, []).append((at, len(data), zlib.crc32(data)))
            while data:
                written = os.pwrite(outs[number].fileno(), data, at)
                data, at = data[written:], at + written
        for number, out in outs.items():
            os.fsync(out.fileno())
            for at, size, crc32 in sums[number]:
                if zlib.crc32(_read(out.fileno(), at, size)) != crc32:
                    name = folder / files[number].name
                    raise CheckpointError(f"{name} differs from what was written, at byte {at:,}.")


def _read(descriptor: int, at: int, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := os.pread(descriptor, size - len(data), at + len(data))):
        data += more
    return data
