"""A folder with the encodings of rows that have files: the next run need not read the files of a row that it finds
there.

[Note: what makes a row the same] Its content, and the path, size and modification time of each file that it names; and,
for all rows, the processor's own files, the classes of its parts, which tokens are learned, how much of a file is read,
and the versions of the libraries that read them. A file that changes without changing any of these is detected in
training, where its tokens are compared with the stored ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import tempfile
import uuid
from array import array
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardproof.data.encoding.columns import NAMES, Columns
from shardproof.data.encoding.report import Labelled
from shardproof.data.forms.parts import Problem, parts_of
from shardproof.data.media.encode import MediaEncoder
from shardproof.data.media.reading import state_of
from shardproof.data.rows import Row
from shardproof.errors import ConfigError
from shardproof.models.loading.processors import file_parts, write_processing

log = logging.getLogger("shardproof")

READERS = "shardproof", "transformers", "tokenizers", "pillow", "soundfile", "av"
KEYS = "names"  # column of the rows' hashes, next to their tokens
AT_ONCE = 5000  # rows written at a time


class RowCache:
    """Encoded rows in a folder, keyed by an 8-byte hash.

    Args:
        folder: the user's folder. Each processor, and each set of options, has a subfolder of its own.
        encoder: the encoder of the rows.

    Raises:
        ConfigError: the folder cannot be created.
    """

    def __init__(self, folder: Path, encoder: MediaEncoder) -> None:
        self._encoder, self.folder = encoder, folder / _name(encoder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--row-cache {folder} cannot be used: {error.strerror or error}.") from None
        self._tables: list[Any] = []
        self._places: dict[int, tuple[int, int]] = {}
        for file in sorted(self.folder.glob("*.arrow")):
            self._read(file)
        self._new, self._names = Columns(), array("Q")

    def _read(self, file: Path) -> None:
        import pyarrow as pa

        try:
            table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
            names = table.column(KEYS).to_pylist()
        except (OSError, pa.ArrowException, KeyError) as error:
            log.warning("%s is ignored, and its rows are encoded again: %s.", file, " ".join(str(error).split()))
            return
        number = len(self._tables)
        self._tables.append(table.combine_chunks())
        self._places.update((name, (number, i)) for i, name in enumerate(names))

    def name(self, row: Row) -> int | None:
        """The key of a row; None if one of its files is missing."""
        told = json.dumps([row.messages, row.extra, row.kind], default=repr, ensure_ascii=False)
        try:
            files = [state_of(part[part["type"]], row, self._encoder.limits) for part in parts_of(row.messages)]
        except Problem:
            return None
        told += json.dumps(files, default=repr)
        return int.from_bytes(hashlib.blake2b(told.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")

    def __contains__(self, name: int | None) -> bool:
        return name in self._places

    def __getitem__(self, name: int) -> Labelled:
        """Token ids and labels of the row with this key, and its weights, if any."""
        table, i = self._places[name]
        kept = {name: code for name, code in NAMES.items() if name in self._tables[table].column_names}
        return tuple(
            array(code, self._tables[table].column(column)[i].values.to_numpy().tobytes())
            for column, code in kept.items()
        )

    def add(self, name: int, *labelled: Any) -> None:
        """Add a row to those that `write` will write. Writes now and then, so that a killed run has not read all files
        in vain."""
        self._names.append(name)
        self._new.append(*labelled)
        if len(self._names) >= AT_ONCE:
            self.write()

    def write(self) -> None:
        """Write the added rows. If the disk is full or read-only, this logs a warning instead of raising."""
        import numpy as np
        import pyarrow as pa

        if not self._names:
            return
        table = self._new.dataset().data.table
        table = table.append_column(KEYS, pa.array(np.frombuffer(self._names, dtype=np.uint64)))
        file = self.folder / f"{uuid.uuid4().hex}.arrow"
        unfinished = file.with_suffix(".unfinished")
        try:
            with pa.OSFile(str(unfinished), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
                writer.write_table(table)
            os.replace(unfinished, file)
        except OSError as error:
            log.warning("Encoded rows are not kept: %s cannot be written: %s.", unfinished, error.strerror or error)
            with contextlib.suppress(OSError):  # a read-only file system refuses this, too
                unfinished.unlink(missing_ok=True)
        self._new, self._names = Columns(), array("Q")


def _name(encoder: MediaEncoder) -> str:
    """The name of the subfolder for rows encoded this way."""
    versions = {name: _version(name) for name in READERS}
    limits = {name: value for name, value in asdict(encoder.limits).items() if not name.startswith("remote")}
    said = [versions, file_parts(encoder.processor), limits, encoder.options]
    told = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode())
    for file in _code_of(encoder.processor):
        told.update(file.read_bytes())
    with tempfile.TemporaryDirectory(prefix="shardproof-") as scratch:
        write_processing(encoder.processor, scratch)
        for file in sorted(file for file in Path(scratch).rglob("*") if file.is_file()):
            told.update(file.name.encode() + file.read_bytes())
    return told.hexdigest()[:24]


def _code_of(processor: Any) -> list[Path]:
    """The code files that came with the model for the processor or its parts, and those in the same folders, since such
    a file may import others."""
    classes = {type(one) for one in (processor, *vars(processor).values())}
    own = [cls for cls in classes if not cls.__module__.startswith(("transformers.", "shardproof.", "builtins"))]
    folders = {Path(inspect.getfile(cls)).parent for cls in own}
    return sorted(file for folder in folders for file in folder.glob("*.py"))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
