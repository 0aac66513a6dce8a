"""Sources that can be read from any place on, without keeping records: for streaming.

A place consists of plain values (numbers, strings, and lists and dicts of these), so that a checkpoint can store it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from shardproof.data.sources.hub import HubName, no_datasets, not_given
from shardproof.data.sources.records import (
    BOM,
    KINDS,
    CsvSource,
    JsonLinesSource,
    StdlibSource,
    TextWalk,
    as_called,
    no_parquet,
    open_source,
    parse_json,
)
from shardproof.errors import DataError, ShardproofError


class Reading(Protocol):
    """Records from some place on, each with its line and its content (a `BadRecord` if it cannot be parsed)."""

    def __iter__(self) -> Iterator[tuple[int, Any]]: ...
    def at(self) -> Any:
        """Where the record after the last one begins."""


class Streamed(Protocol):
    """A source that can be read from any place on; None is the beginning."""

    name: str
    columns: dict[str, str]

    def reading(self, at: Any = None) -> Reading: ...


def open_stream(name: str, columns: dict[str, str]) -> Streamed:
    """The source with this name.

    Raises:
        DataError: as for `open_source`; and for a JSON list, which cannot be read from a place on.
    """
    kinds = KINDS | {".jsonl": _json, ".ndjson": _json, ".json": _json, ".csv": Table, ".tsv": Table}
    found: Streamed = open_source(name, columns, kinds | {".parquet": Parquet}, HubStream, Embedded)  # type: ignore[assignment]
    return found


class Lines(JsonLinesSource):
    """JSON Lines. A place is a byte offset and a line number."""

    def reading(self, at: Any = None) -> Reading:
        return _Lines(self._path, *(at or (0, 0)))


def _opened(path: Path, offset: int) -> BinaryIO:
    """A file, opened at the beginning of a line."""
    file = path.open("rb")
    file.seek(max(0, offset - 1))
    if offset and file.read(1) != b"\n" and offset != path.stat().st_size:
        raise DataError(f"{path} has changed since the checkpoint was written: no line begins at byte {offset}.")
    return file


class _Lines:
    def __init__(self, path: Path, offset: int, line: int) -> None:
        self._file, self._offset, self._line = _opened(path, offset), offset, line

    def at(self) -> Any:
        return [self._offset, self._line]

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for raw in self._file:
            self._offset += len(raw)
            self._line += 1
            if raw.strip() and raw.strip() != BOM:
                yield self._line, parse_json(raw)
        self._file.close()


def _json(name: str, path: Path, columns: dict[str, str]) -> Lines:
    with path.open("rb") as file:
        first = next(stripped[:1] for line in file if (stripped := line.removeprefix(BOM).strip()))
    if first == b"[":
        raise DataError(
            f"{name} is a single JSON list, which has to be in memory as a whole, so it cannot be read with "
            "--streaming.\nWrite it as JSON Lines, one row per line."
        )
    return Lines(name, path, columns)


class Table(CsvSource):
    """CSV and TSV. A place is a byte offset and a line number."""

    def reading(self, at: Any = None) -> Reading:
        return _Table(self, self._path, *(at or (self._start, self._start_line)))

    def next_record(self, walk: TextWalk) -> Any:
        return self._next(walk)


class _Table:
    def __init__(self, table: Table, path: Path, offset: int, line: int) -> None:
        self._table, self._file = table, _opened(path, offset)
        self._walk = TextWalk(self._file, offset, line)

    def at(self) -> Any:
        return [self._walk.offset, self._walk.line]

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        while True:
            line = self._walk.line + 1
            if (record := self._table.next_record(self._walk)) is None:
                break
            if record != {}:  # a blank line
                yield line, record
        self._file.close()


class Parquet:
    """A Parquet file, with one row group in memory. A place is a row number."""

    def __init__(self, name: str, path: Path, columns: dict[str, str]) -> None:
        self.name, self.columns, self._path = name, columns, path
        try:
            import pyarrow.parquet as pq
        except ImportError:
            raise no_parquet(name) from None
        try:
            pq.ParquetFile(path).close()
        except Exception as error:  # pyarrow raises several kinds for one cause
            raise DataError(f"{name} is not a Parquet file: {' '.join(str(error).split())[:200]}") from None

    def reading(self, at: Any = None) -> Reading:
        return _Parquet(self._path, self.columns, at or 0)


class _Parquet:
    BATCH = 256  # rows converted to Python objects at a time

    def __init__(self, path: Path, columns: dict[str, str], row: int) -> None:
        self._path, self._columns, self._row = path, columns, row

    def at(self) -> Any:
        return self._row

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        import pyarrow.parquet as pq

        with pq.ParquetFile(self._path) as file:
            before, group = 0, 0
            while (
                group < file.num_row_groups and before + (rows := file.metadata.row_group(group).num_rows) <= self._row
            ):
                before, group = before + rows, group + 1
            groups = range(group, file.num_row_groups)
            for batch in file.iter_batches(self.BATCH, row_groups=groups) if groups else ():
                for record in batch.slice(min(max(self._row - before, 0), len(batch))).to_pylist():
                    self._row += 1
                    yield self._row, as_called(record, self._columns)
                before += len(batch)


class Embedded(StdlibSource):
    """The embedded rows. A place is a row number."""

    def reading(self, at: Any = None) -> Reading:
        return _Embedded(self, at or 0, len(self._rows))


class _Embedded:
    def __init__(self, source: Embedded, row: int, rows: int) -> None:
        self._source, self._row, self._rows = source, row, rows

    def at(self) -> Any:
        return self._row

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        while self._row < self._rows:
            self._row += 1
            yield self._source.record(self._row - 1)


class HubStream:
    """One split of a dataset from the hub, fetched as it is read. A place is the state of `datasets`, and a row
    number."""

    def __init__(self, name: str, of: HubName, columns: dict[str, str]) -> None:
        self.name, self.columns, self._of = name, columns, of
        self._rows = self._load()

    def _load(self) -> Any:
        try:
            import datasets
        except ImportError:
            raise no_datasets(self.name) from None
        of = self._of
        try:
            return datasets.load_dataset(of.fetched(), of.subset, split=of.split, revision=of.state, streaming=True)
        except ShardproofError:
            raise
        except Exception as error:  # from datasets, the hub's client, the network ...
            raise not_given(self.name, error) from None

    def reading(self, at: Any = None) -> Reading:
        return _Hub(self.name, self._load(), self.columns, at)

    def __reduce__(self) -> tuple[Any, ...]:
        return HubStream, (self.name, self._of, self.columns)


class _Hub:
    def __init__(self, name: str, rows: Any, columns: dict[str, str], at: Any) -> None:
        self._name, self._rows, self._columns, self._row = name, rows, columns, 0
        if at:
            self._row = at["row"]
            rows.load_state_dict(at["state"])

    def at(self) -> Any:
        return {"row": self._row, "state": self._rows.state_dict()}

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        rows = iter(self._rows)
        while True:
            try:
                record = next(rows, None)
            except Exception as error:  # the network, after the retries of datasets
                reason = " ".join(str(error).split())[:400] or type(error).__name__
                raise DataError(f"{self._name}: the hub does not return row {self._row + 1}: {reason}") from None
            if record is None:
                return
            self._row += 1
            yield self._row, as_called(record, self._columns)
