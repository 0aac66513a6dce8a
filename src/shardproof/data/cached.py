"""Encoded rows in a folder, written once by `shardproof data encode` and used for any number of training runs.

[Note: what is kept] The folder holds the encodings and also the rows themselves, as read and in order, including those
that were left out: a resumed run compares their checksums, a multimodal model reads their files again, and checks look
at their text. Everything is memory-mapped, and shared by the processes of a machine.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import shutil
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

from shardproof.data.rows import BadRow, Places, Row, Rows, RowSource, parse_spec
from shardproof.data.sources.ready import SAID
from shardproof.errors import ConfigError, DataError

ENCODED, ROWS = "encoded", "rows"  # subfolders
OF, BYTES = "number of the row", "bytes in base64"  # a column of the encoded dataset; a value in a row
FORM = 2  # version of the folder format that this release writes
AT_ONCE = 10_000  # rows put into a table at a time


class CachedRows(RowSource):
    """The rows of a folder of encoded rows.

    Args:
        name: the folder's path, as the user wrote it.

    Attributes:
        said: the metadata recorded when they were written: see `write`.

    Raises:
        ConfigError: there is no such folder.
    """

    def __init__(self, name: str) -> None:
        import datasets

        folder = Path(name).expanduser().absolute()  # other processes may have another working directory
        self.name, self.columns, self.folder, self.said = name, {}, folder, said_in(name)
        with _quietly():
            self._rows = datasets.load_from_disk(str(folder / ROWS))
        self._sums = array("I", self._rows.data.column("sum").to_numpy().tobytes())
        self._source, self._line = (self._rows.data.column(name).to_numpy() for name in ("source", "line"))

    def __len__(self) -> int:
        return len(self._sums)

    def records(self) -> Iterator[tuple[int, int, Any]]:
        return ((number, *self.record(number)) for number in range(len(self)))

    def record(self, number: int) -> tuple[int, Any]:
        row = self.row(number)
        return row.line, {"messages": row.messages, **row.extra}

    def row(self, number: int) -> Row:
        text = self._rows.data.column("row")[number].as_py()
        messages, extra, kind = json.loads(text, object_hook=_with_bytes)
        return Row(messages, *self.place(number), extra, kind)

    def place(self, number: int) -> tuple[str, int]:
        return self.said["sources"][self._source[number]], int(self._line[number])

    def checksum(self, number: int) -> int:
        return self._sums[number]

    @property
    def skipped(self) -> list[BadRow]:
        """The bad rows that were left out."""
        return [BadRow(*row) for row in self.said["skipped"]]

    @cached_property
    def _encoded(self) -> tuple[Any, Any]:
        """The encoded dataset, and the number of the original row for each of its rows.

        If its folder is read-only, it is read into memory: `datasets` writes what it derives from a dataset on disk
        into the dataset's folder.
        """
        import datasets

        place = self.folder / ENCODED
        with _quietly():
            found = datasets.load_from_disk(str(place), keep_in_memory=not os.access(place, os.W_OK))
        return found.remove_columns([OF]), found.data.column(OF).to_numpy()

    def encoded(self, wanted: Sequence[int], longest: int | None = None) -> tuple[Any, bool]:
        """The encodings of these rows, in their order, without those longer than `longest` tokens: a dataset with
        `places`, `numbers` (positions in `wanted`) and `cut` (those that lost tokens); and whether it contains
        everything."""
        import numpy as np

        dataset, numbers = self._encoded
        first, last = (np.searchsorted(numbers, wanted, side) for side in ("left", "right"))
        counts = last - first
        of = np.repeat(np.arange(len(wanted)), counts)
        places = np.arange(len(of)) + np.repeat(first - counts.cumsum() + counts, counts)
        if longest is not None:
            short = _lengths(dataset)[places] <= longest
            places, of = places[short], of[short]
        whole = len(places) == len(numbers) and bool((places == np.arange(len(numbers))).all())
        with _quietly():  # flattened, since code that reads the Arrow table would not see the selection
            found = dataset if whole else dataset.select(places).flatten_indices()
        rows = numbers[places]
        found.places = Places.of(self.said["sources"], self._source[rows], self._line[rows])
        found.numbers = array("q", of.astype("int64").tobytes())
        found.cut = array("q", of[np.isin(rows, self.said["cut"])].astype("int64").tobytes())
        return found, whole and len(wanted) == len(self)


def _lengths(dataset: Any) -> Any:
    import pyarrow.compute

    return pyarrow.compute.list_value_length(dataset.with_format("arrow")["input_ids"][:]).to_numpy()


def counted(dataset: Any) -> tuple[int, int]:
    """The number of tokens, and how many of them are learned."""
    import numpy as np

    ids, learnt = 0, 0
    for start in range(0, len(dataset), AT_ONCE):
        labels = dataset.with_format("arrow")[start : start + AT_ONCE]["labels"].combine_chunks().flatten().to_numpy()
        ids, learnt = ids + len(labels), learnt + int(np.count_nonzero(labels != -100))
    return ids, learnt


def said_in(name: str) -> dict[str, Any]:
    """The metadata of a folder of encoded rows.

    Raises:
        ConfigError: it is not a folder of encoded rows, has a format that this release does not read, or is incomplete.
    """
    folder = Path(name).expanduser()
    try:
        said: dict[str, Any] = json.loads((folder / SAID).read_text(encoding="utf-8"))
        form = said.get("form")
    except (OSError, ValueError, AttributeError):
        inside = sorted(file.parent.name for file in folder.glob(f"*/{SAID}"))
        there = f" It contains {' and '.join(inside)}: name one of them." if inside else ""
        what = "is not a folder of encoded rows" if folder.exists() else "does not exist"
        raise ConfigError(f"{name} {what}.{there}\n'shardproof data encode' creates such a folder.") from None
    if form != FORM:
        raise ConfigError(f"{name} was written by another release of shardproof. Encode its rows again.")
    found = _sizes(folder)
    for file, size in said["files"].items():
        if found.get(file) != size:
            has = f"has {found[file]:,} of {size:,} bytes" if file in found else "is missing"
            raise ConfigError(
                f"{name} has changed since it was written: {file} {has}.\nCopy it again, or encode its rows again."
            )
    return said


def _sizes(folder: Path) -> dict[str, int]:
    """The size in bytes of each file of the rows and their encodings."""
    files = (file for name in (ROWS, ENCODED) for file in sorted((folder / name).glob("*")))
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}


def opened(specs: Sequence[str]) -> tuple[list[CachedRows], list[int | None]]:
    """The folders that these arguments name, and how many rows to take from each: `DIR#1000`."""
    parsed = [parse_spec(spec) for spec in specs]
    return [CachedRows(name) for name, _ in parsed], [limit for _, limit in parsed]


def write(folder: Path, rows: Rows, encoded: Any, said: dict[str, Any], day: date) -> None:
    """Write rows and their encodings to a folder.

    Args:
        folder: created, or replaced if it exists.
        encoded: a dataset with `numbers` and `report`, and `cut` where rows lost tokens.
        said: the settings that a run must share with the command that encoded them.
        day: the date that a chat template writes.

    Raises:
        DataError: a row holds a value that cannot be stored. ConfigError: the folder cannot be written.
    """
    import numpy as np

    unfinished = folder.with_name(f"{folder.name}.{uuid4().hex[:8]}.unfinished")  # other processes may write there too
    sources: dict[str, int] = {}
    try:
        unfinished.mkdir(parents=True)
        with _quietly():
            _table(rows, sources).save_to_disk(str(unfinished / ROWS))
            numbers = np.frombuffer(encoded.numbers, dtype=np.int64)
            encoded.add_column(OF, numbers).save_to_disk(str(unfinished / ENCODED))
        told = {
            "form": FORM,
            **said,
            "day": str(day),
            "report": dataclasses.asdict(encoded.report),
            "cut": list(getattr(encoded, "cut", ())),
            "sources": list(sources),
            "skipped": [[row.source, row.line, row.problem] for row in rows.skipped],
            "files": _sizes(unfinished),
        }
        (unfinished / SAID).write_text(json.dumps(told, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}.") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove a folder of encoded rows, and nothing else.

    Raises:
        ConfigError: it cannot be removed.
    """
    if (folder / SAID).exists():
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be removed: {error.strerror or error}.") from None


def _table(rows: Rows, sources: dict[str, int]) -> Any:
    """The rows as a dataset; `sources` collects the names of their files, with their numbers."""
    import datasets
    import pyarrow as pa

    tables = []
    for start in range(0, len(rows), AT_ONCE):
        some = [rows[number] for number in range(start, min(start + AT_ONCE, len(rows)))]
        columns = {
            "row": pa.array([_text(row) for row in some], pa.large_string()),
            "source": pa.array([sources.setdefault(row.source, len(sources)) for row in some], pa.int32()),
            "line": pa.array([row.line for row in some], pa.int64()),
        }
        tables.append(pa.table(columns))
    sums = pa.array(rows.checksums(), pa.uint32())
    return datasets.Dataset(pa.concat_tables(tables).append_column("sum", sums))


def _text(row: Row) -> str:
    try:
        return json.dumps([row.messages, row.extra, row.kind], ensure_ascii=False, default=_without_bytes)
    except TypeError as error:
        raise DataError(f"{row.where}: the row cannot be stored: {error}. Train on its file directly.") from None


def _without_bytes(value: Any) -> Any:
    if isinstance(value, bytes):
        return {BYTES: base64.b64encode(value).decode()}
    raise TypeError(f"it contains a value of type {type(value).__name__}")


def _with_bytes(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[BYTES]) if value.keys() == {BYTES} else value


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the progress bars of `datasets`."""
    import datasets

    shown = datasets.utils.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
