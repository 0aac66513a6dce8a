"""The files of a checkpoint, with the storage interfaces of torch.distributed.checkpoint.

One file per rank, each item as `torch.save` writes it. Every item's checksum is computed while it is written and
compared with what is read back from the disk.
"""

from __future__ import annotations

import dataclasses
import io
import os
import zlib
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardproof.checkpoint.folder import Aside
from shardproof.checkpoint.manifest import Manifest, Piece
from shardproof.errors import CheckpointError

READ = 1 << 20  # bytes that are read back at a time


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Writer(FileSystemWriter):
    """Writes this rank's file and reads it back; on rank 0, makes the checkpoint complete.

    Args:
        aside: the folder as rank 0 has it; others know its path only.
        manifest: what rank 0 knows before anything is written.
    """

    def __init__(self, path: Path, aside: Aside | None = None, manifest: Manifest | None = None) -> None:
        super().__init__(path)
        self.folder, self.aside, self.manifest = path, aside, manifest

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        results, pieces = [], []
        with (self.folder / name).open("wb") as file:
            for item in plan.items:
                piece = self._write_item(file, name, planner.resolve_data(item))
                pieces.append(piece)
                results.append(WriteResult(item.index, piece.size, piece))
            file.flush()
            os.fsync(file.fileno())
            # So that what is read back comes from the disk, where the system allows it.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._read_back(name, pieces)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_item(self, file: IO[bytes], name: str, data: Any) -> Piece:
        """Nothing of it is left when the next one is made."""
        at, sink = file.tell(), _Sink(file)
        if isinstance(data, torch.Tensor):
            # torch.save writes the whole storage that a tensor lies in.
            shared = data.is_cpu and data.untyped_storage().nbytes() != data.nbytes
            torch.save(data.detach().to("cpu", copy=shared), sink)  # type: ignore[arg-type]  # it needs no more of a file
        else:
            sink.write(data.getbuffer())
        if sink.error is not None:
            raise sink.error
        return Piece(name, at, sink.size, sink.crc32)

    def _read_back(self, name: str, pieces: list[Piece]) -> None:
        with (self.folder / name).open("rb") as file:
            for piece in pieces:
                if _checksum(file, piece.size) != piece.crc32:
                    raise CheckpointError(
                        f"{self.folder / name} reads otherwise than it was written, at byte {piece.at:,}: the disk or "
                        "the memory is faulty."
                    )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all ranks have written."""
        if self.aside is None or self.manifest is None:
            raise CheckpointError("Only rank 0 can finish a checkpoint.")
        where: dict[MetadataIndex, Piece] = {r.index: r.storage_data for part in results for r in part}
        for index, piece in where.items():
            if index.offset is None:
                self.manifest.values[index.fqn] = piece
        for name, saved in metadata.state_dict_metadata.items():
            if isinstance(saved, TensorStorageMetadata):
                self.manifest.tensors[name].chunks = [
                    (chunk.offsets[0], chunk.sizes[0], where[MetadataIndex(name, chunk.offsets)])
                    for chunk in saved.chunks
                ]
        for name, tensor in self.manifest.tensors.items():
            if sum(count for _, count, _ in tensor.chunks) != torch.Size(tensor.shape).numel():
                raise CheckpointError(f"'{name}' is not there in full: the ranks hold different parts than they say.")
        for piece in where.values():
            self.manifest.files[piece.file] = (self.folder / piece.file).stat().st_size
        plain = [
            [
                dataclasses.replace(r, storage_data=_StorageInfo(p.file, p.at, p.size))
                for r in part
                for p in (where[r.index],)
            ]
            for part in results
        ]
        super().finish(metadata, plain)
        self.aside.publish(self.manifest)


class _Sink:
    """What torch.save writes to: a file, with the checksum of what went into it.

    Attributes:
        error: why nothing more was written. It is not raised out of torch's C++, which could not clean up behind it.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size = self.crc32 = 0
        self.error: OSError | None = None

    def write(self, data: memoryview) -> None:
        if self.error is not None:
            return
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
        self.size += data.nbytes
        self.crc32 = zlib.crc32(data, self.crc32)

    def flush(self) -> None:
        """Nothing: more is to come."""


def _checksum(file: IO[bytes], size: int) -> int:
    """Of the next bytes of a file, as far as there are any."""
    found = 0
    while size > 0 and (data := file.read(min(size, READ))):
        found, size = zlib.crc32(data, found), size - len(data)
    return found


class Reader(FileSystemReader):
    """Reads what a manifest describes, and compares every item's checksum."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder)
        self.folder, self.manifest = folder, manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors, pieces = {}, {}
        for name, tensor in self.manifest.tensors.items():
            numel = torch.Size(tensor.shape).numel()
            chunks = []
            for first, count, piece in tensor.chunks:
                chunks.append(ChunkStorageMetadata(torch.Size([first]), torch.Size([count])))
                pieces[MetadataIndex(name, [first])] = piece
            properties = TensorProperties(getattr(torch, tensor.dtype))
            tensors[name] = TensorStorageMetadata(properties, torch.Size([numel]), chunks)
        return Metadata(tensors, storage_data=pieces, storage_meta=StorageMeta(load_id=self.load_id))  # type: ignore[arg-type]

    def value(self, name: str) -> bytes:
        """What is no tensor."""
        piece = self.manifest.values[name]
        with (self.folder / piece.file).open("rb") as file:
            return self._checked(file, piece, name)

    def _checked(self, file: IO[bytes], piece: Piece, name: str) -> bytes:
        file.seek(piece.at)
        data = file.read(piece.size)
        if zlib.crc32(data) != piece.crc32:
            raise CheckpointError(f"{self.folder / piece.file} is damaged: the checksum of '{name}' is wrong.")
        return data

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        def place(item: Any) -> tuple[str, int]:
            piece = self.storage_data[item.storage_index]
            return piece.file, piece.at

        for (name, _), items in groupby(sorted(plan.items, key=place), key=place):
            self._read_items(name, list(items), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_items(self, name: str, requests: list[Any], planner: LoadPlanner) -> None:
        """What is wanted of one item of a file; nothing of it is left when the next one is read."""
        index = requests[0].storage_index
        with (self.folder / name).open("rb") as file:
            data = self._checked(file, self.storage_data[index], index.fqn)
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        for request in requests:
            target = planner.resolve_tensor(request).detach()
            target.copy_(tensor.narrow(0, request.storage_offsets[0], request.lengths[0]))
            planner.commit_tensor(request, target)
