"""Where records come from: a file of a known kind, a dataset from the hub, or the embedded rows.

A source reads its file once and afterwards finds any record again without keeping it: lines of JSON and CSV by their
file offset, Parquet through Arrow. A `.json` file with one big list has to be kept in memory in full, and so does a
Parquet file, as Arrow columns.
"""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from shardproof.data.sources.ready import SAID
from shardproof.errors import DataError

csv.field_size_limit(2**31 - 1)

BOM = b"\xef\xbb\xbf"
_SUBSETS = re.compile(r"((?:\w\w::)?[\w.-]+/[\w.-]+):([\w.-]+(?:/[\w.-]+)+)")  # ms-swift's notation
CALLED = ("tools", "tool_calls")  # fields whose inner names differ from row to row
OPEN = 64  # files kept open: a process may have a few hundred, a dataset thousands
_open: deque[BinaryIO] = deque()


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be parsed."""

    problem: str


class Source(Protocol):
    """A sequence of records that can be iterated over, after which any of them can be accessed by number."""

    name: str
    columns: dict[str, str]

    def records(self) -> Iterator[tuple[int, int, Any]]:
        """Number, line and content of every record; the content is a `BadRecord` if it cannot be parsed."""

    def record(self, number: int) -> tuple[int, Any]:
        """Line and content of a record from `records`."""


def open_source(
    name: str,
    columns: dict[str, str],
    kinds: Mapping[str, Any] | None = None,
    of_hub: Callable[..., Any] | None = None,
    embedded: Callable[..., Any] | None = None,
) -> Source:
    """The source with this name. A file's extension selects the class; the other arguments replace our classes.

    Raises:
        DataError: there is no such file, it is a folder or empty, its extension is unknown or it cannot be read.
    """
    from shardproof.data.sources.hub import HubSource, hub_name

    if name == "stdlib":
        return (embedded or StdlibSource)(columns)
    if of := hub_name(name):
        return (of_hub or HubSource)(name, of, columns)
    path = Path(name).expanduser()
    kind = (kinds or KINDS).get(path.suffix.lower())
    if path.is_dir():
        if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
            raise DataError(f"{name} is a folder written by save_to_disk of datasets. {FIRST['.arrow']}")
        if (path / SAID).is_file():
            raise DataError(f"{name} is a folder of encoded rows; give it to --cached-dataset.")
        files = sorted(p.name for p in path.iterdir() if p.suffix.lower() in KINDS)
        inside = f" It holds {', '.join(files[:5])}{', ...' if len(files) > 5 else ''}." if files else ""
        raise DataError(f"{name} is a folder. Name the files in it to read.{inside}")
    if not path.exists():
        raise DataError(
            f"There is no file {name}{_hint(path)}. Name a file, a dataset on the hub (OWNER/NAME), or 'stdlib' for "
            "the embedded rows."
        )
    if kind is None:
        ending = f"ends in {path.suffix!r}" if path.suffix else "has no extension"
        first = FIRST.get(path.suffix.lower(), "")
        raise DataError(f"{name} {ending}; files to read end in {', '.join(KINDS)}.{first and ' '}{first}")
    try:
        with path.open("rb") as file:
            if not any(chunk.removeprefix(BOM).strip() for chunk in iter(lambda: file.read(65536), b"")):
                raise DataError(f"{name} is empty.")
        return kind(name, path, columns)
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}.") from error


def identity(source: Source) -> tuple[type, Path]:
    """The identity of a source, whatever its name: sources with the same identity have the same records."""
    return type(source), Path(source.name).expanduser().resolve()


def _hint(path: Path) -> str:
    import difflib

    if several := _SUBSETS.fullmatch(str(path)):
        each = " ".join(f"{several[1]}:{subset}" for subset in several[2].split("/"))
        return f" (of several subsets, each is a dataset: {each})"
    if not path.parent.is_dir():
        return f" (there is no folder {path.parent} either)"
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()], n=1)
    return f" (did you mean {path.with_name(near[0])}?)" if near else ""


class JsonLinesSource:
    """One JSON value per line. Blank lines count as lines but not as records."""

    def __init__(self, name: str, path: Path, columns: dict[str, str]) -> None:
        self.name, self.columns, self._path = name, columns, path
        self._offsets, self._lines = array("q"), array("q")
        self._file: BinaryIO | None = None
        self._opened_by = 0

    def records(self) -> Iterator[tuple[int, int, Any]]:
        self._offsets, self._lines = array("q"), array("q")
        offset = 0
        with self._path.open("rb") as file:
            for line, raw in enumerate(file, 1):
                if raw.strip() and raw.strip() != BOM:
                    self._offsets.append(offset)
                    self._lines.append(line)
                    yield len(self._lines) - 1, line, parse_json(raw)
                offset += len(raw)

    def record(self, number: int) -> tuple[int, Any]:
        # Forked processes share the position in an open file.
        if self._file is None or self._file.closed or self._opened_by != os.getpid():
            self._file, self._opened_by = self._path.open("rb"), os.getpid()
            _open.append(self._file)
            while len(_open) > OPEN:
                _open.popleft().close()
        self._file.seek(self._offsets[number])
        return self._lines[number], parse_json(self._file.readline())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}


def json_source(name: str, path: Path, columns: dict[str, str]) -> Source:
    """A JSON list of records, or JSON Lines, whatever the extension: the first character decides."""
    with path.open("rb") as file:
        first = next(stripped[:1] for line in file if (stripped := line.removeprefix(BOM).strip()))
    return (JsonListSource if first == b"[" else JsonLinesSource)(name, path, columns)


class JsonListSource:
    """One JSON list with a record in each place, however it is split into lines."""

    def __init__(self, name: str, path: Path, columns: dict[str, str]) -> None:
        self.name, self.columns = name, columns
        self._records: list[tuple[int, Any]] = []
        try:
            self._text = path.read_bytes().removeprefix(BOM).decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{name} is not UTF-8 text (byte {error.start}).") from None

    def records(self) -> Iterator[tuple[int, int, Any]]:
        self._records = []
        text, decoder = self._text, json.JSONDecoder()
        ends = array("q", (match.start() for match in re.finditer("\n", text)))

        def line(at: int) -> int:
            return bisect_right(ends, at - 1) + 1

        def skip(at: int) -> int:
            while at < len(text) and text[at] in " \t\r\n":
                at += 1
            return at

        at = skip(text.index("[") + 1)
        while text[at : at + 1] != "]":
            begin = at
            try:
                value, at = decoder.raw_decode(text, begin)
                at = skip(at)
                if at >= len(text):
                    raise json.JSONDecodeError("The list is not closed with ']'", text, at)
                if text[at] not in ",]":
                    raise json.JSONDecodeError("Expecting ',' or ']' after a row", text, at)
                if text[at] == "," and ((at := skip(at + 1)) >= len(text) or text[at] == "]"):
                    raise json.JSONDecodeError("Nothing follows the last ','", text, at)
            except (ValueError, RecursionError) as error:
                where = error.pos if isinstance(error, json.JSONDecodeError) else begin
                yield len(self._records), line(where), BadRecord(f"not JSON: {_reason(error)}; the rest was not read")
                return
            self._records.append((line(begin), value))
            yield len(self._records) - 1, line(begin), value
        if (at := skip(at + 1)) < len(text):  # such as another list, if files were concatenated
            problem = BadRecord("not JSON: the list has ended; the text after it was not read")
            yield len(self._records), line(at), problem

    def record(self, number: int) -> tuple[int, Any]:
        return self._records[number]


class CsvSource:
    """A table with a header line. Read with the csv module, so that `42` stays text and a record keeps its line."""

    def __init__(self, name: str, path: Path, columns: dict[str, str]) -> None:
        self.name, self.columns, self._path = name, columns, path
        self._delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        with path.open("rb") as file:
            walk = TextWalk(file)
            try:
                self._header = next(csv.reader(walk, delimiter=self._delimiter, strict=True))
            except (csv.Error, UnicodeDecodeError) as error:
                raise DataError(f"{name}:1: the header cannot be read: {_told(error)}.") from None
            self._start, self._start_line = walk.offset, walk.line
        twice = sorted({label for label in self._header if self._header.count(label) > 1})
        if twice:
            raise DataError(f"{name}:1: the header names the column {twice[0]!r} twice.")

    def records(self) -> Iterator[tuple[int, int, Any]]:
        self._offsets, self._lines = array("q"), array("q")
        with self._path.open("rb") as file:
            walk = TextWalk(file, self._start, self._start_line)
            while True:
                offset, line = walk.offset, walk.line + 1
                record = self._next(walk)
                if record is None:
                    return
                if record == {}:  # a blank line
                    continue
                self._offsets.append(offset)
                self._lines.append(line)
                yield len(self._lines) - 1, line, record

    def record(self, number: int) -> tuple[int, Any]:
        with self._path.open("rb") as file:
            return self._lines[number], self._next(TextWalk(file, self._offsets[number], 0))

    def _next(self, walk: TextWalk) -> Any:
        try:
            values = next(csv.reader(walk, delimiter=self._delimiter, strict=True), None)
        except UnicodeDecodeError:
            return BadRecord("not UTF-8 text")
        except csv.Error as error:
            return BadRecord(f"not CSV: {_told(error)}")
        if values is None:
            return None
        if len(values) != len(self._header) and values:
            return BadRecord(f"{len(values)} values for the {len(self._header)} columns of the header")
        # An empty cell of a table means that the row does not have the field.
        return {key: value if value != "" else None for key, value in zip(self._header, values, strict=False)}


def _told(error: Exception) -> str:
    if "new-line character" in str(error):  # Python's message is about an argument of open()
        return r"a carriage return (\r) ends a line without a newline (\n): rewrite the file with newlines"
    return str(error)


class TextWalk:
    """Lines of text, with the file offset where the next one begins."""

    def __init__(self, file: BinaryIO, offset: int = 0, line: int = 0) -> None:
        self._file, self.offset, self.line = file, offset, line
        file.seek(offset)

    def __iter__(self) -> TextWalk:
        return self

    def __next__(self) -> str:
        raw = self._file.readline()
        if not raw:
            raise StopIteration
        first = self.offset == 0
        self.offset += len(raw)
        self.line += 1
        return (raw.removeprefix(BOM) if first else raw).decode("utf-8")


class TableSource:
    """Rows of an Arrow table. The line is the row number."""

    # Rows converted to Python objects at a time, limited by their size in bytes.
    BATCH, BATCH_BYTES = 1024, 1 << 24

    name: str
    columns: dict[str, str]
    _table: Any

    def records(self) -> Iterator[tuple[int, int, Any]]:
        rows, size = self._table.num_rows, max(1, self._table.nbytes)
        batches = self._table.to_batches(max_chunksize=max(1, min(self.BATCH, self.BATCH_BYTES * rows // size)))
        for number, record in enumerate(record for batch in batches for record in batch.to_pylist()):
            yield number, number + 1, as_called(record, self.columns)

    def record(self, number: int) -> tuple[int, Any]:
        return number + 1, as_called(self._table.slice(number, 1).to_pylist()[0], self.columns)


def as_called(record: Any, columns: Mapping[str, str]) -> Any:
    """A row of an Arrow table without the nulls that the table adds to tools and tool calls: a column has the same
    fields in all rows, so a call of one tool has the arguments of all others, as nulls. `columns`: the names of fields
    in the table, where they differ."""
    return _as_called(record, {*CALLED, *(columns[field] for field in CALLED if field in columns)})


def _as_called(value: Any, called: Collection[str]) -> Any:
    if isinstance(value, list):
        return [_as_called(one, called) for one in value] if value and isinstance(value[0], dict) else value
    if not isinstance(value, dict):
        return value
    if value.get("type") == "tool_use":  # a call in Anthropic's format
        called = {*called, "input"}
    return {key: _filled(one) if key in called else _as_called(one, called) for key, one in value.items()}


def _filled(value: Any) -> Any:
    if isinstance(value, list):
        return [_filled(one) for one in value]
    if isinstance(value, dict):
        return {key: _filled(one) for key, one in value.items() if one is not None}
    return value


class ParquetSource(TableSource):
    """A Parquet file read through pyarrow, as `datasets` does."""

    def __init__(self, name: str, path: Path, columns: dict[str, str]) -> None:
        try:
            import pyarrow.parquet as pq
        except ImportError:
            raise no_parquet(name) from None
        self.name, self.columns = name, columns
        try:
            self._table = pq.read_table(path, memory_map=True)
        except Exception as error:  # pyarrow raises several kinds for one cause
            raise DataError(f"{name} is not a Parquet file: {' '.join(str(error).split())[:200]}") from None


def no_parquet(name: str) -> DataError:
    return DataError(f"{name}: Parquet needs pyarrow: pip install 'shardproof[train]'.")


class StdlibSource:
    """The embedded rows."""

    def __init__(self, columns: dict[str, str]) -> None:
        from shardproof.data.sources.stdlib import stdlib_rows

        self.name, self.columns = "stdlib", columns
        self._rows = stdlib_rows()
        if not self._rows:
            raise DataError("This Python runs without docstrings (-OO), so --dataset stdlib has no rows. Name a file.")

    def records(self) -> Iterator[tuple[int, int, Any]]:
        for number, row in enumerate(self._rows):
            yield number, number + 1, row

    def record(self, number: int) -> tuple[int, Any]:
        return number + 1, self._rows[number]


def parse_json(raw: bytes) -> Any:
    """The value on a line, or a `BadRecord`."""
    try:
        return json.loads(raw.removeprefix(BOM).rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRecord(f"not UTF-8 text (byte {error.start + 1} of the line)")
    except (ValueError, RecursionError) as error:
        return BadRecord(f"not JSON: {_reason(error)}")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.colno}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return f"a number has more than {sys.get_int_max_str_digits()} digits"


# How to convert files of kinds that cannot be read.
FIRST = {
    ".txt": 'Of text, write a line {"text": ...} for each document.',
    ".gz": "Unpack it first: gunzip FILE.",
    ".arrow": "Convert it first: datasets.load_from_disk(FOLDER).to_parquet('train.parquet').",
}
KINDS: dict[str, Any] = {
    ".jsonl": json_source,
    ".ndjson": json_source,
    ".json": json_source,
    ".csv": CsvSource,
    ".tsv": CsvSource,
    ".parquet": ParquetSource,
}
