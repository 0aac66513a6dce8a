"""The files of a checkpoint, through the storage interfaces of torch.distributed.checkpoint.

There is one file per rank, with each item as `torch.save` writes it. Every item's checksum is computed during writing
and compared with the bytes read back from the disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pickle
import zlib
from collections.abc import Mapping
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

from shardproof.checkpoint.elsewhere import END, WINDOW, Post, Sent
from shardproof.checkpoint.folder import Aside, open_checkpoint
from shardproof.checkpoint.manifest import Manifest, Piece
from shardproof.checkpoint.saving import Channel
from shardproof.errors import CheckpointError

READ = 1 << 20  # bytes to read back at a time


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Writer(FileSystemWriter):
    """Writes this rank's file and reads it back; on rank 0, completes the checkpoint.

    Args:
        aside: the folder, on rank 0; its path on the others.
        manifest: the part of the manifest that rank 0 knows before anything is written.
        files: small files, by name, for rank 0 to write. They are written here because an error raised between the
            collectives of torch.distributed.checkpoint ends the save on all ranks and leaves none waiting.
        posts: rank 0's posts to the ranks that cannot see the folder, and theirs to rank 0.
    """

    def __init__(
        self,
        path: Path,
        aside: Aside | None = None,
        manifest: Manifest | None = None,
        files: Mapping[str, bytes] | None = None,
        posts: Mapping[int, Post] | None = None,
    ) -> None:
        super().__init__(path)
        self.folder, self.aside, self.manifest = path, aside, manifest
        self.files, self.posts = dict(files or {}), dict(posts or {})

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan if 0 in self.posts else super().prepare_local_plan(plan)  # which creates the folder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        if 0 in self.posts:
            results = self._send(name, plan, planner)
        else:
            try:
                if self.aside is not None and self.manifest is not None:
                    self.aside.write(self.files, self.manifest)
                with (self.folder / name).open("wb") as file:
                    results = self._write_items(file, name, plan, planner)
                    _flush(file)
                self._read_back(name, [result.storage_data for result in results])
            finally:  # the senders must not wait forever
                problems = [self._receive(f"__{rank}_0.distcp", post) for rank, post in self.posts.items()]
            for problem in filter(None, problems):
                raise problem
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_items(self, file: IO[bytes], name: str, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        pieces = ((item, self._write_item(file, name, planner.resolve_data(item))) for item in plan.items)
        return [WriteResult(item.index, piece.size, piece) for item, piece in pieces]

    def _send(self, name: str, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Send what this rank would write to rank 0."""
        try:
            with io.BufferedWriter(Sent(self.posts[0]), WINDOW) as file:
                return self._write_items(file, name, plan, planner)  # type: ignore[arg-type]  # it is a file in all that matters
        finally:
            self.posts[0].end()

    def _receive(self, name: str, post: Post) -> Exception | None:
        """Write what another rank sends, and read it back. Returns an error instead of raising it: everything the rank
        sends has to be received."""
        problem: Exception | None = None
        pieces: list[Piece] = []
        with contextlib.ExitStack() as stack:
            file: IO[bytes] | None = None
            while (packet := post.receive())[0] != END:
                _, at, _, data = packet
                try:
                    if problem is None:
                        file = file or stack.enter_context((self.folder / name).open("wb"))
                        file.write(data)
                        pieces.append(Piece(name, at, len(data), zlib.crc32(data)))
                except OSError as error:
                    problem = error
            try:
                if problem is None:
                    file = file or stack.enter_context((self.folder / name).open("wb"))
                    _flush(file)
                    self._read_back(name, pieces)
            except (OSError, CheckpointError) as error:
                problem = error
        return problem

    def _write_item(self, file: IO[bytes], name: str, data: Any) -> Piece:
        """Write one item, releasing its memory before the next."""
        at, sink = file.tell(), _Sink(file)
        if isinstance(data, torch.Tensor):
            # torch.save writes the whole storage of a tensor.
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
                        f"{self.folder / name} differs from what was written, at byte {piece.at:,}: the disk or "
                        "the memory is faulty."
                    )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called on rank 0 when all ranks have written."""
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
                raise CheckpointError(f"'{name}' is incomplete: the ranks hold other parts than they announced.")
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
    """A file for torch.save to write to, which computes the checksum.

    Attributes:
        error: why writing stopped. It is not raised through torch's C++ code, which could not clean up after it.
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
        """Nothing to do: more is to come."""


def _flush(file: IO[bytes]) -> None:
    """Flush to disk, and drop the file from the page cache if possible, so that it is read back from the disk."""
    file.flush()
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _checksum(file: IO[bytes], size: int) -> int:
    """The checksum of the next `size` bytes of a file, or of as many as there are."""
    found = 0
    while size > 0 and (data := file.read(min(size, READ))):
        found, size = zlib.crc32(data, found), size - len(data)
    return found


class Reader(FileSystemReader):
    """Reads what a manifest describes, and verifies every item's checksum.

    Args:
        posts: rank 0's posts to the ranks that cannot see the folder, and theirs to rank 0.
        values: on a rank that cannot see the folder, everything but tensors.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        posts: Mapping[int, Post] | None = None,
        values: Mapping[str, bytes] | None = None,
    ) -> None:
        super().__init__(folder)
        self.folder, self.manifest = folder, manifest
        self.posts, self._values = dict(posts or {}), values
        self._files = sorted(manifest.files)

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
        """A value that is not a tensor."""
        piece = self.manifest.values[name]
        data = self._read(piece) if self._values is None else self._values.get(name, b"")
        return self._checked(data, piece, name)

    def _wanted(self, piece: Piece, name: str) -> bytes:
        if 0 not in self.posts:
            return self._checked(self._read(piece), piece, name)
        self.posts[0].send(self._files.index(piece.file), piece.at, piece.size)
        return self._checked(self.posts[0].receive()[3], piece, name)

    def _checked(self, data: Any, piece: Piece, name: str) -> Any:
        if zlib.crc32(data) != piece.crc32:
            raise CheckpointError(f"{self.folder / piece.file} is damaged: the checksum of '{name}' is wrong.")
        return data

    def _read(self, piece: Piece) -> bytes:
        with (self.folder / piece.file).open("rb") as file:
            file.seek(piece.at)
            return file.read(piece.size)

    def _serve(self, post: Post) -> None:
        """Read for another rank until it has everything. Items that cannot be read are sent empty: damaged."""
        while (packet := post.receive())[0] != END:
            number, at, size, _ = packet
            try:
                data = self._read(Piece(self._files[number], at, size, 0))
            except OSError:
                data = b""
            post.send(0, data=data)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        def place(item: Any) -> tuple[str, int]:
            piece = self.storage_data[item.storage_index]
            return piece.file, piece.at

        try:
            for _, items in groupby(sorted(plan.items, key=place), key=place):
                self._read_items(list(items), planner)
        finally:  # the ranks that ask must not wait forever
            for rank, post in self.posts.items():
                post.end() if rank == 0 else self._serve(post)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_items(self, requests: list[Any], planner: LoadPlanner) -> None:
        """Read the requested parts of each item, releasing its memory before the next."""
        index = requests[0].storage_index
        data = self._wanted(self.storage_data[index], index.fqn)
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        for request in requests:
            target = planner.resolve_tensor(request).detach()
            target.copy_(tensor.narrow(0, request.storage_offsets[0], request.lengths[0]))
            planner.commit_tensor(request, target)


def open_for_all(channel: Channel, path: str | os.PathLike[str]) -> Reader:
    """A reader for the checkpoint at `path` on rank 0, even if a rank on another machine sees none there, or another
    one. Collective.

    Raises:
        CheckpointError: on all ranks: there is no complete checkpoint, or ranks on one machine name different ones.
    """
    opened: list[tuple[Path, Manifest]] = []
    problem = ""
    try:
        opened.append(open_checkpoint(path))
    except CheckpointError as error:
        problem = str(error)
    seen = channel.everyone((opened[0][1].created, str(opened[0][0])) if opened else (None, problem))
    (first, said), blind = seen[0], [rank for rank, (created, _) in enumerate(seen) if created != seen[0][0]]
    if first is None:
        raise CheckpointError(said)
    if blind and not channel.several_machines:
        other, told = seen[blind[0]]
        apart = f"Rank 0 loads {said}, and rank {blind[0]} {told}. Name the same checkpoint on all ranks."
        raise CheckpointError(told if other is None else apart)
    if not blind:
        return Reader(*opened[0])
    posts = channel.posts(blind)
    if channel.rank == 0:
        for rank, post in posts.items():
            post.send(0, data=pickle.dumps((*opened[0], _values_for(rank, *opened[0]))))
    if channel.rank not in blind:
        return Reader(*opened[0], posts)
    folder, manifest, values = pickle.loads(posts[0].receive()[3])
    return Reader(folder, manifest, posts, values)


def _values_for(rank: int, folder: Path, manifest: Manifest) -> dict[str, bytes]:
    """The values other than tensors that a rank needs. Those that cannot be read are empty, which counts as damaged."""
    reader, found = Reader(folder, manifest), {}
    for name in {name.partition("@")[0] for name in manifest.values}:
        if place := manifest.place(name, rank):
            piece = manifest.values[place]
            with contextlib.suppress(OSError):
                found[place] = reader._read(piece)
    return found
