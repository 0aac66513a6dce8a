"""Where checkpoints lie: the folder one is written in, and the complete ones that are there.

[Note: complete or not there]
A checkpoint is written into a folder of another name (`step-20.unfinished`). When every byte was read back and is
right, the manifest is written, everything is flushed, and the folder is renamed. So whatever ends the program, and
whenever, a folder of the name that was asked for is a whole checkpoint. One that is replaced steps aside
(`step-20.previous`) until the new one has its place.
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
    """A lock on a file, gone with the process that holds it, however that ends.

    Raises:
        CheckpointError: another process holds it; the text begins with `what` and names that process.
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
            else:  # who held it until now has removed it
                file.close()
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_file": None}  # in another process it holds nothing

    def release(self) -> None:
        """Remove the file and let go of it."""
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


class Aside:
    """The folder that a checkpoint is written in before it takes its name. Of rank 0.

    Raises:
        CheckpointError: it cannot be made, another process writes there, or something else has the name.
    """

    def __init__(self, path: Path) -> None:
        self.target, self.path = path, path.with_name(path.name + UNFINISHED)
        if path.exists() and not (path / MANIFEST).is_file() and (not path.is_dir() or any(path.iterdir())):
            raise CheckpointError(f"{path} exists already and is not a checkpoint. Name another folder.")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = Lock(self.path / LOCK, f"Another job is saving to {path}")
            for left in self.path.iterdir():  # of a job that was killed
                if left.name != LOCK:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
        except OSError as error:
            raise CheckpointError(f"Nothing can be saved to {path}: {error.strerror or error}.") from error

    def write(self, files: dict[str, bytes], manifest: Manifest) -> None:
        """Write small files, by name, and have the manifest know them."""
        for name, data in files.items():
            with (self.path / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            manifest.files[name], manifest.sums[name] = len(data), zlib.crc32(data)

    def publish(self, manifest: Manifest) -> None:
        """Make it the checkpoint `path`; one that was there before goes when this one has its place."""
        previous = self.target.with_name(self.target.name + PREVIOUS)
        newest = _by_age(self.target.parent)[-1:]
        if newest and manifest.created <= newest[0][0]:  # the clock was set back, or is another machine's
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
        """Leave nothing behind: a full disk needs the room."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.lock.release()


def flush_folder(path: Path) -> None:
    """Have the names in a folder reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def complete(folder: str | os.PathLike[str]) -> list[Path]:
    """The complete checkpoints in a folder, the newest last. Checks that files are there and of their size; their
    contents are checked when they are loaded."""
    return [path for _, path in _by_age(folder)]


def _by_age(folder: str | os.PathLike[str]) -> list[tuple[float, Path]]:
    """When each was made, and where it lies."""
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
    """Remove all but the newest `keep` of the complete checkpoints that are called like `path` but for the number.

    `spare` is one of those that are kept, whatever its age; the newest is kept beside it.
    """
    stem = path.name.rstrip("0123456789")
    alike = [other for other in complete(path.parent) if other.name.rstrip("0123456789") == stem]
    kept = {path, *alike[-keep:]}
    if spare is not None and spare in alike and spare not in kept:
        kept = {path, spare, *alike[-max(keep - 1, 1) :]}
    for old in alike:
        if old not in kept:
            try:  # its mark goes first: what is half removed must not look complete
                (old / MANIFEST).unlink(missing_ok=True)
            except OSError as error:  # the new one is there all the same
                log.warning("The old checkpoint %s cannot be removed: %s", old, error.strerror or error)
                continue
            shutil.rmtree(old, ignore_errors=True)


def open_checkpoint(path: str | os.PathLike[str]) -> tuple[Path, Manifest]:
    """The folder and the manifest of a complete checkpoint.

    Raises:
        CheckpointError: it is not complete, or damaged; names the newest complete one in it or beside it.
    """
    folder = Path(path).expanduser()
    previous = folder.with_name(folder.name + PREVIOUS)
    if not (folder / MANIFEST).is_file() and (previous / MANIFEST).is_file():
        folder = previous  # the program ended while the new one took its place
    try:
        return folder, Manifest.read(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{offer(folder)}") from error.__cause__


def offer(folder: Path) -> str:
    """A hint at a complete checkpoint in `folder` or beside it."""
    others = complete(folder) or [path for path in complete(folder.parent) if path != folder]
    return f" The newest complete one there is {others[-1]}." if others else ""
