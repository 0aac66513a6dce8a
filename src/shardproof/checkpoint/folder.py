"""Folders of checkpoints: the one being written, and the complete ones.

[Note: complete or not there]
A checkpoint is written into a folder with another name (`step-20.unfinished`). When every byte has been read back and
verified, the manifest is written, everything is flushed, and the folder is renamed. So whenever and however the program
ends, a folder with the requested name is a complete checkpoint. A checkpoint that is replaced is moved aside
(`step-20.previous`) until the new one is in place.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import zlib
from pathlib import Path
from typing import IO, Any

from shardproof.checkpoint.manifest import MANIFEST, Manifest
from shardproof.errors import CheckpointError

log = logging.getLogger("shardproof")

UNFINISHED, PREVIOUS, LOCK = ".unfinished", ".previous", "lock"


class Lock:
    """A lock on a file, released when the process that holds it ends, however it ends.

    Raises:
        CheckpointError: another process holds it; the message begins with `what` and names that process.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self._file: IO[str] | None = None
        while self._file is None:
            file = path.open("a+", encoding="utf-8")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip()
                file.close()
                raise CheckpointError(f"{what} ({holder or 'another process'})") from None
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                self._file = file
            else:  # the previous holder has just removed it
                file.close()
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_file": None}  # a copy in another process holds no lock

    def release(self) -> None:
        """Remove the file and release the lock."""
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


class Aside:
    """The folder into which rank 0 writes a checkpoint before renaming it.

    Raises:
        CheckpointError: it cannot be created, another process writes there, or something else has the name.
    """

    def __init__(self, path: Path) -> None:
        self.target, self.path = path, path.with_name(path.name + UNFINISHED)
        if path.exists() and not (path / MANIFEST).is_file() and (not path.is_dir() or any(path.iterdir())):
            raise CheckpointError(f"{path} exists already and is not a checkpoint. Name another folder.")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = Lock(self.path / LOCK, f"Another job is saving to {path}")
            for left in self.path.iterdir():  # left by a job that was killed
                if left.name != LOCK:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
        except OSError as error:
            raise CheckpointError(f"Nothing can be saved to {path}: {error.strerror or error}.") from error

    def write(self, files: dict[str, bytes], manifest: Manifest) -> None:
        """Write small files, by name, and list them in the manifest."""
        for name, data in files.items():
            with (self.path / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            manifest.files[name], manifest.sums[name] = len(data), zlib.crc32(data)

    def publish(self, manifest: Manifest) -> None:
        """Rename it to `path`; a checkpoint that was there is removed once this one is in place."""
        previous = self.target.with_name(self.target.name + PREVIOUS)
        newest = _by_age(self.target.parent)[-1:]
        if newest and manifest.created <= newest[0][0]:  # the clock was set back, or another machine wrote that one
            manifest.created = newest[0][0] + 0.001
        manifest.write(self.path)
        flush_folder(self.path)
        self.lock.release()
        if (self.target / MANIFEST).is_file():
            shutil.rmtree(previous, ignore_errors=True)
            self.target.rename(previous)
        self.path.rename(self.target)
        flush_folder(self.target.parent)
        shutil.rmtree(previous, ignore_errors=True)

    def discard(self) -> None:
        """Remove everything: a full disk needs the room."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.lock.release()


def flush_folder(path: Path) -> None:
    """Flush the directory entry of a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def complete(folder: str | os.PathLike[str]) -> list[Path]:
    """The complete checkpoints in a folder, the newest last. Checks that files exist and have the right size; their
    contents are checked when they are loaded."""
    return [path for _, path in _by_age(folder)]


def _by_age(folder: str | os.PathLike[str]) -> list[tuple[float, Path]]:
    """When each was created, and its path."""
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for path in Path(folder).iterdir():
            if path.name.endswith(UNFINISHED):
                continue
            with contextlib.suppress(CheckpointError):
                found.append((Manifest.read(path).created, path))
    return sorted(found)


def newest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder, or None."""
    found = complete(folder)
    return found[-1] if found else None


def remove_old(path: Path, keep: int, spare: Path | None = None) -> None:
    """Of the complete checkpoints named like `path` except for the number, remove all but the newest `keep`.

    `spare` counts as one of those kept, whatever its age; the newest is always kept as well.
    """
    stem = path.name.rstrip("0123456789")
    alike = [other for other in complete(path.parent) if other.name.rstrip("0123456789") == stem]
    kept = {path, *alike[-keep:]}
    if spare is not None and spare in alike and spare not in kept:
        kept = {path, spare, *alike[-max(keep - 1, 1) :]}
    for old in alike:
        if old not in kept:
            try:  # the manifest first: a partly removed checkpoint must not look complete
                (old / MANIFEST).unlink(missing_ok=True)
            except OSError as error:  # the new one is complete all the same
                log.warning("The old checkpoint %s cannot be removed: %s", old, error.strerror or error)
                continue
            shutil.rmtree(old, ignore_errors=True)


def open_checkpoint(path: str | os.PathLike[str]) -> tuple[Path, Manifest]:
    """The folder and the manifest of a complete checkpoint.

    Raises:
        CheckpointError: it is incomplete or damaged; names the newest complete one in or beside it.
    """
    folder = Path(path).expanduser()
    previous = folder.with_name(folder.name + PREVIOUS)
    if not (folder / MANIFEST).is_file() and (previous / MANIFEST).is_file():
        folder = previous  # the program ended while the new one was being renamed
    try:
        return folder, Manifest.read(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{offer(folder)}") from error.__cause__


def offer(folder: Path) -> str:
    """A hint naming a complete checkpoint in or beside `folder`."""
    others = complete(folder) or [path for path in complete(folder.parent) if path != folder]
    return f" The newest complete one there is {others[-1]}." if others else ""
