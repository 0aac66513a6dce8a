"""Rows read while training: only a block of rows is in memory, whatever the size of the files.

[Note: blocks] A stream is read in blocks of `--shuffle-buffer-size` rows. A block is encoded, packed if packing is on,
and shuffled by the seed, the pass over the data and the number of the block. So every rank that reads the stream sees
the same rows in the same order, and a checkpoint only needs to store where a block begins and how many of its rows were
taken.
"""

from __future__ import annotations

import json
import logging
import random
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardproof.data.encoding.columns import Columns
from shardproof.data.encoding.encode import Encoder, learnt_of
from shardproof.data.encoding.pack import pack_rows
from shardproof.data.encoding.report import EncodeReport, checked_length, nothing_left
from shardproof.data.forms.formats import SUPERVISED, Form, Problem
from shardproof.data.forms.halves import refuse_halves
from shardproof.data.forms.parts import text_of
from shardproof.data.rows import BadRow, BadRows, Row, describe_bad, parse_spec
from shardproof.data.sources.readings import open_stream
from shardproof.data.sources.records import BadRecord
from shardproof.errors import DataError

log = logging.getLogger("shardproof")

DEFAULT_SIZE = 1000  # rows in a block
_TEXTS = 10_000  # rows for training a tokenizer


class Place(NamedTuple):
    """Where a block begins: the pass over the data, the source, and the number of its records already read."""

    passes: int = 0
    block: int = 0
    source: int = 0
    records: int = 0
    at: Any = None


class Read(NamedTuple):
    """A block as read, and where the next one begins."""

    rows: list[Row]
    bad: list[BadRow]
    after: Place


class RowStream:
    """Rows of one or more sources, read without keeping them.

    Attributes:
        skipped: empty; bad rows are found when they are reached.
    """

    def __init__(
        self,
        names: Sequence[str],
        size: int = DEFAULT_SIZE,
        columns: Mapping[str, str] | None = None,
        form: Form = SUPERVISED,
    ) -> None:
        specs = [parse_spec(name) for name in names]
        self._limits = [limit for _, limit in specs]
        self._sources = [open_stream(name, dict(columns or {})) for name, _ in specs]
        self._form, self._size = form, size
        self._open: Place | None = None  # where `_reading` continues
        self._reading: Any = None
        self._records: Iterator[tuple[int, Any]] = iter(())
        self.skipped: list[BadRow] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None, "_reading": None, "_records": None}

    def read(self, place: Place) -> Read:
        """The block that begins there. It ends at the latest with the pass over the data; if `passes` is negative, with
        its source."""
        rows: list[Row] = []
        bad: list[BadRow] = []
        passes, block, number, records, at = place
        end = len(self._sources) if passes >= 0 else number + 1
        for _ in range(self._size):
            found = None
            while number < end and (found := self._next(place, number, records, at)) is None:
                number, records, at = number + 1, 0, None
            if found is None:
                self._open = None
                return Read(rows, bad, Place(passes + 1))
            records += 1
            row = self._checked(number, *found)
            (rows if isinstance(row, Row) else bad).append(row)  # type: ignore[arg-type]
        after = Place(passes, block + 1, number, records, self._reading.at())
        self._open = after
        return Read(rows, bad, after)

    def _next(self, place: Place, number: int, records: int, at: Any) -> tuple[int, Any] | None:
        """Line and content of the next record of a source, or None at its end."""
        limit = self._limits[number]
        if limit is not None and records >= limit:
            return None
        if self._open != place or records == 0:
            self._open, self._reading = place, self._sources[number].reading(at)
            self._records = iter(self._reading)
        return next(self._records, None)

    def _checked(self, number: int, line: int, record: Any) -> Row | BadRow:
        source = self._sources[number]
        try:
            if isinstance(record, BadRecord):
                raise Problem(record.problem)
            messages, extra, kind = self._form.normalise(record, source.columns)
            refuse_halves({"messages": messages, **extra}, record)
        except Problem as problem:
            return BadRow(source.name, line, str(problem))
        return Row(messages, source.name, line, extra, kind)

    def refuse(self, bad: Sequence[BadRow], good: int) -> DataError:
        """The error for a block with bad rows, or with no others."""
        return DataError(describe_bad(bad, len(bad) + good, self._form))

    def look(self, bad_rows: BadRows) -> None:
        """Read the first block of each source, so that a problem with all of its rows is reported at once.

        Raises:
            DataError: a source is empty, or its first rows are bad.
        """
        fields: list[set[str]] = []
        for number, source in enumerate(self._sources):
            if next(iter(source.reading()), None) is None:
                raise DataError(f"{source.name} has no rows. Expected: {self._form.expected}")
            read = self.read(Place(-1, source=number))
            if read.bad and (bad_rows == "stop" or not read.rows):
                raise self.refuse(read.bad, len(read.rows))
            if source.columns:
                fields.append(self._fields(number))
        for name, column in self._sources[0].columns.items():
            for source, there in zip(self._sources, fields, strict=True):
                if column not in there and (name not in there or not any(column in some for some in fields)):
                    log.warning("The first rows of %s have no column %r, which --columns names.", source.name, column)
        self._open = None

    def _fields(self, number: int) -> set[str]:
        """The fields of the first records of a source. A column that is missing from these is usually, but not always,
        a mistake."""
        seen = set[str]()
        for records, (_, record) in enumerate(self._sources[number].reading()):
            seen.update(record if isinstance(record, dict) else ())
            if records + 1 == self._size:
                break
        return seen

    def checksums(self) -> array[int]:
        """Four bytes for each source, computed from its first record, to detect different data."""
        firsts = (next(iter(source.reading()), None) for source in self._sources)
        texts = (json.dumps(first and first[1], sort_keys=True, default=repr) for first in firsts)
        return array("I", (zlib.crc32(text.encode()) for text in texts))

    def __getitem__(self, number: int) -> Row:
        """The place of a source's first row, for which `checksums` has a value."""
        return Row([], self._sources[number].name, 1)

    def texts(self) -> Iterator[str]:
        """The text of the turns of the first rows, for training a tokenizer."""
        place, left = Place(), _TEXTS
        while place.passes == 0 and left > 0:
            rows, _, place = self.read(place)
            left -= len(rows)
            yield from (text for row in rows for turn in row.messages if (text := text_of(turn["content"])))


class Position(NamedTuple):
    """Where in a stream training is: a block, and how many of its rows were taken, in training order."""

    place: Place = Place()
    taken: int = 0


class Block(NamedTuple):
    """A block as used for training.

    Attributes:
        rows: the rows to train on, in their order.
        report: counts of the rows that were read, kept and left out.
        bad: bad rows that were left out.
    """

    place: Place
    rows: Sequence[Mapping[str, Any]]
    report: EncodeReport
    bad: list[BadRow]


@dataclass
class EncodedStream:
    """Rows to train on, encoded when their block is read; endless, as one pass follows another.

    Attributes:
        passes: iteration ends with the step that contains the last row of this many passes; None: never.
        shuffled: whether the rows of a block are shuffled.
        packing: pack the rows of a block.
    """

    stream: RowStream
    tokenizer: Any
    max_length: int | None
    loss: Any = "answer"
    truncation: Any = "drop"
    system: str | None = None
    bad_rows: BadRows = "stop"
    packing: bool = False
    shuffled: bool = True
    seed: int = 0
    weights: Any = ()
    passes: int | None = None
    report: str = field(default="while training, a block of rows at a time", init=False)

    def __post_init__(self) -> None:
        checked_length(self.max_length)

    def blocks(self, place: Place) -> Iterator[Block]:
        """The block that begins at a place, and all that follow. A block with no rows left is empty.

        Raises:
            DataError: a row is bad and `bad_rows` is `stop`, a row is too long and `truncation` is `raise`, or no row
                of a full pass was left.
        """
        encoder = Encoder(self.tokenizer, self.loss, self.system, self.bad_rows, self.weights)
        whole, bad = (EncodeReport(), list[BadRow]()) if place == Place(place.passes) else (None, [])
        while True:
            block, after = self._block(encoder, place)
            bad = bad[:10] + block.bad if whole is not None else []
            whole = whole and whole.plus(block.report)
            if after.passes > place.passes:
                if whole is not None and not whole.kept:
                    raise self.stream.refuse(bad, 0) if bad else DataError(nothing_left(whole, self.max_length))
                whole, bad = EncodeReport(), []
            place = after
            yield block

    def _block(self, encoder: Encoder, place: Place) -> tuple[Block, Place]:
        read, report, columns = self.stream.read(place), EncodeReport(), Columns()
        bad, learnt = list(read.bad), 0
        for _, labelled in learnt_of(encoder.packed(read.rows), self.max_length, self.truncation, report, bad):
            columns.append(*labelled)
            learnt += 1
        if bad and self.bad_rows == "stop":
            raise self.stream.refuse(bad, report.rows)
        rows: Any = columns.dataset() if learnt else []
        if self.packing and learnt:
            rows.report = report
            rows = pack_rows(rows, self.max_length)
        order = list(range(len(rows)))
        if self.shuffled:
            random.Random(f"{self.seed} {place.passes} {place.block}").shuffle(order)
        return Block(place, _Ordered(rows, order), report, bad), read.after


class _Ordered(Sequence[Mapping[str, Any]]):
    """Rows in another order."""

    def __init__(self, rows: Any, order: Sequence[int]) -> None:
        self._rows, self._order = rows, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[self._order[index]]


def dealt(
    encoded: EncodedStream, begin: Position, micro: int, reader: int, readers: int, accumulation: int = 1
) -> Iterator[tuple[list[Mapping[str, Any]], Position, list[Block]]]:
    """Micro-batches of one reader: rows k * micro to (k + 1) * micro of every `readers * micro`, where k is its number.
    They start where a step begins; a step has `accumulation` of them. The last step is filled up from the next pass.

    Yields: the rows; the position in the stream once all readers have taken theirs; and the blocks that begin within
        this stretch, without their rows.
    """
    mine: list[Mapping[str, Any]] = []
    new: list[Block] = []
    at, step, skip = 0, 0, begin.taken
    for block in encoded.blocks(begin.place):
        if not skip:
            new.append(block._replace(rows=()))
        for taken in range(skip, len(block.rows)):
            if step == 0 and encoded.passes is not None and block.place.passes >= encoded.passes:
                return
            step = (step + 1) % (readers * micro * accumulation)
            if reader * micro <= at < (reader + 1) * micro:
                mine.append(block.rows[taken])
            at += 1
            if at == readers * micro:
                yield mine, Position(block.place, taken + 1), new
                mine, new, at = [], [], 0
        skip = 0


def batches(
    encoded: EncodedStream,
    begin: Position,
    collate: Callable[[Iterable[Any]], Any],
    micro: int,
    reader: int,
    readers: int,
    accumulation: int,
) -> Iterator[tuple[Any, Position, list[Block]] | DataError]:
    """The output of `dealt`, with each micro-batch collated. A DataError is yielded as the last item: raised in a
    worker process, it would be passed on with a traceback in its message."""
    try:
        for rows, position, new in dealt(encoded, begin, micro, reader, readers, accumulation):
            yield collate(rows), position, new
    except DataError as error:
        yield error
