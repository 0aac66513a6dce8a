"""Rows of a dataset, checked and normalised to one form before training.

JSON Lines, JSON and CSV are read here and not by `datasets`: a bad row must be reported with its file and line, but
`datasets` keeps neither, infers one type for a whole column and writes a copy to a cache first. `sources` finds the
records in a file, `forms` defines what a record may look like, and this file combines the two.
"""

from __future__ import annotations

import json
import logging
import random
import re
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, overload

from shardproof.data.forms.formats import SUPERVISED, Form, Problem
from shardproof.data.forms.halves import printable, refuse_halves
from shardproof.data.forms.parts import text_of
from shardproof.data.sources.mixture import Mixture, mixed
from shardproof.data.sources.places import Places as Places
from shardproof.data.sources.ready import RowSource
from shardproof.data.sources.records import BadRecord, Source, identity, open_source
from shardproof.errors import DataError

log = logging.getLogger("shardproof")

Kind = Literal["chat", "text"]
BadRows = Literal["stop", "skip"]

SHOWN = 5  # bad rows listed in an error message


@dataclass(frozen=True, slots=True)
class Row:
    """One row, in the single form that all formats are normalised to.

    Attributes:
        messages: turns with `role` (system, user, assistant, tool) and `content`, at least one of them an answer
            (assistant). A turn with `loss: False` is context that is not learned. The content of a turn with files is a
            list of parts (see `parts.py`).
        source: the file the row came from, or `stdlib`.
        line: the line of the file on which the row begins, counted from 1; for a Parquet file, the row's number.
        extra: arguments of the chat template besides the messages, such as `tools`; for forms other than `SUPERVISED`,
            whatever the form defines.
        kind: `chat` rows go through the model's chat template. `text` rows (plain `prompt` and `completion`) have one
            user turn and one assistant turn, which are joined as they are.
    """

    messages: list[dict[str, Any]]
    source: str
    line: int
    extra: dict[str, Any] = field(default_factory=dict)
    kind: Kind = "chat"

    @property
    def where(self) -> str:
        return f"{self.source}:{self.line}"


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used, and why; `columns` comes from its `Problem`."""

    source: str
    line: int
    problem: str
    columns: str = ""

    def __str__(self) -> str:
        return printable(f"{self.source}:{self.line}: {self.problem}")


class Rows(Sequence[Row]):
    """Checked rows of one or more files. Only the position of each row stays in memory; a row is parsed when it is
    accessed.

    Attributes:
        skipped: the bad rows that `bad_rows="skip"` left out, in order.
        fields: the fields of all records read, in order, if `columns` renames any.
    """

    fields: Sequence[str] = ()

    def __init__(
        self,
        sources: Sequence[Source],
        where: Sequence[tuple[int, int]] | _Where,
        skipped: Sequence[BadRow] = (),
        form: Form = SUPERVISED,
    ) -> None:
        self._sources, self._form = tuple(sources), form
        self._where = where if isinstance(where, _Where) else _Where(where)
        self.skipped = list(skipped)

    def __len__(self) -> int:
        return len(self._where)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Row | Rows:
        if isinstance(index, slice):
            return self.take(range(*index.indices(len(self))))
        number, record = self._where[index]
        source = self._sources[number]
        return source.row(record) if isinstance(source, RowSource) else _row(source, *source.record(record), self._form)

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def shares(self) -> str:
        """Text saying how many rows each source has, and how many distinct ones."""
        many = Counter(number for number, _ in self._where)
        different = Counter(number for number, _ in set(self._where))
        return ", ".join(f"{s.name} {many[n]:,} ({different[n]:,} different)" for n, s in enumerate(self._sources))

    def take(self, indices: Iterable[int]) -> Rows:
        """The rows with these numbers, in this order."""
        return Rows(self._sources, _Where(self._where[i] for i in indices), self.skipped, self._form)

    def and_of(self, sources: Sequence[RowSource], chosen: Sequence[Sequence[int]], skipped: Sequence[BadRow]) -> Rows:
        """These rows, followed by the `chosen` ones of each of `sources`."""
        first = len(self._sources)
        more = ((first + number, record) for number, records in enumerate(chosen) for record in records)
        where = _Where(chain(self._where, more))
        rows = Rows([*self._sources, *sources], where, [*self.skipped, *skipped], self._form)
        rows.fields = self.fields
        return rows

    @property
    def ready(self) -> bool:
        """Whether any of them come from a `RowSource`, already checked."""
        return any(isinstance(source, RowSource) for source in self._sources)

    def by_source(self) -> list[tuple[Source, list[tuple[int, int]]]]:
        """Each source with the numbers of its rows and of their records, in order."""
        found: list[list[tuple[int, int]]] = [[] for _ in self._sources]
        for number, (source, record) in enumerate(self._where):
            found[source].append((number, record))
        return [(source, numbers) for source, numbers in zip(self._sources, found, strict=True) if numbers]

    def split(self, share: float, seed: int = 0) -> tuple[Rows, Rows]:
        """Two disjoint parts, in file order: the rows to train on, and a held-out `share` of them. If a row is repeated
        (also because its file is given twice, or together with a folder of its encoded rows), one copy is held out and
        the others are in neither part.

        Raises:
            DataError: there are too few rows to hold out that share and keep one to train on.
        """
        places = self._places()
        first = {place: i for i, place in reversed(list(enumerate(places)))}
        different = sorted(first.values())
        held = max(1, round(len(different) * share))
        if not 0 < share < 1 or held >= len(different):
            raise DataError(
                f"Cannot hold out a share of {share} of {len(different)} row(s) and still have some to train on."
            )
        out = sorted(random.Random(seed).sample(different, held))
        held_out = {places[i] for i in out}
        return self.take(i for i, place in enumerate(places) if place not in held_out), self.take(out)

    def _places(self) -> list[Any]:
        """An identity for each row, the same for copies. The file of rows that were encoded earlier may have moved, so
        these, and the rows of files given with them, are identified by file name, line and record."""
        if self.ready and len(self._sources) > 1:
            return [(*self._origin(*place), total) for place, total in zip(self._where, self.checksums(), strict=True)]
        known = [identity(source) for source in self._sources]
        numbers = [known.index(one) for one in known]
        return [(numbers[source], record) for source, record in self._where]

    def _origin(self, number: int, record: int) -> tuple[str, int]:
        source = self._sources[number]
        name, line = source.place(record) if isinstance(source, RowSource) else (source.name, source.record(record)[0])
        return Path(name).name, line

    def records(self) -> Iterator[Any]:
        """The records in the files, as they were before normalisation."""
        return (self._sources[number].record(record)[1] for number, record in self._where)

    def checksums(self) -> array[int]:
        """Four bytes for each row, to detect a record that was edited or replaced."""
        sums = array("I")
        for number, record in self._where:
            source = self._sources[number]
            if isinstance(source, RowSource):
                sums.append(source.checksum(record))
            else:
                content = source.record(record)[1]
                sums.append(zlib.crc32(json.dumps(content, sort_keys=True, default=repr).encode()))
        return sums

    def texts(self) -> Iterator[str]:
        """The text of every turn, for training a tokenizer."""
        for row in self:
            for message in row.messages:
                if text := text_of(message["content"]):
                    yield text


class _Where:
    """Pairs of (source number, record number within it), 12 bytes each."""

    def __init__(self, pairs: Iterable[tuple[int, int]]) -> None:
        self._source, self._record = array("i"), array("q")
        for source, record in pairs:
            self._source.append(source)
            self._record.append(record)

    def __len__(self) -> int:
        return len(self._record)

    def __getitem__(self, i: int) -> tuple[int, int]:
        return self._source[i], self._record[i]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._source, self._record, strict=True)


def read_rows(
    sources: Sequence[str | Path],
    *,
    bad_rows: BadRows = "stop",
    seed: int = 0,
    columns: Mapping[str, str] | None = None,
    form: Form = SUPERVISED,
    mixture: Mixture | None = None,
    others: bool = False,
) -> Rows:
    """Read and check every row of these files.

    Args:
        sources: files in JSON Lines, JSON, CSV, TSV or Parquet, datasets from the hub (see hub.py), or `stdlib` for the
            embedded rows. `NAME#1000` takes 1000 of its rows, sampled with `seed` and kept in file order. If there are
            fewer, all are repeated as often as they fit into 1000, and the rest is sampled.
        bad_rows: `stop` raises if any row is bad, after checking all of them; `skip` leaves them out and lists them in
            `Rows.skipped`.
        seed: seeds the sample that `#1000` takes.
        columns: the names of fields in the files, where they differ: `{"query": "question", "response": "answer"}`.
        form: what a row must look like, and how it is normalised.
        mixture: each source's share of the rows, which are drawn with `seed`.
        others: whether there are more files, which may have the columns that `columns` names; the caller then uses
            `check_columns`.

    Returns:
        The rows of all files, one file after the other, or an epoch's mixture of them.

    Raises:
        DataError: a file is missing, is a folder, has an unknown extension, has no rows or lacks a column that
            `columns` names; or rows are bad. The message gives the file and line, what is wrong and what is expected.
    """
    if not sources:
        raise DataError("No dataset was named. Name a file, or 'stdlib' for the embedded rows.")
    opened: list[Source] = []
    parts: list[list[tuple[int, int]]] = []
    bad: list[BadRow] = []
    seen: list[tuple[Source, dict[str, None]]] = []
    total, fields = 0, dict[str, None]()  # an ordered set
    for number, spec in enumerate(sources):
        name, limit = parse_spec(str(spec))
        source = open_source(name, dict(columns or {}))
        opened.append(source)
        usable, unusable, there = _check(source, form)
        fields |= there
        seen.append((source, there))
        total += len(usable) + len(unusable)
        if not usable and not unusable:
            raise DataError(f"{name} has no rows. Expected: {form.expected}")
        bad.extend(unusable)
        if limit is not None and usable:
            usable = drawn(usable, limit, seed)
        parts.append([(number, record) for record in usable])
    if not others:
        check_columns([source.name for source in opened], columns or {}, list(fields))
    for source, there in seen:  # its rows may have another form, or lack an optional field
        for field_, column in source.columns.items():
            if field_ not in there and column not in there:
                log.warning("%s has no column %r, which --columns names.", source.name, column)
    if bad and (bad_rows == "stop" or not any(parts)):
        raise DataError(describe_bad(bad, total, form))
    lacking = [source.name for source, rows in zip(opened, parts, strict=True) if not rows]
    if mixture is not None and lacking:
        raise DataError(f"{lacking[0]}: none of its rows can be used, but --interleave-prob gives it a share.")
    where = _Where(chain.from_iterable(parts)) if mixture is None else mixed(parts, mixture, seed)
    rows = Rows(opened, where, bad, form)
    rows.fields = list(fields)
    return rows


def drawn(records: array[int], limit: int, seed: int) -> array[int]:
    """`limit` of these records: a sample, or all of them as often as they fit and a sample for the rest."""
    whole, part = divmod(limit, len(records))
    return records * whole + array("q", sorted(random.Random(seed).sample(records, part)))


def _check(source: Source, form: Form) -> tuple[array[int], list[BadRow], dict[str, None]]:
    """The numbers of the good records, the bad ones, and the fields of all, if any are renamed."""
    good, bad = array("q"), []
    seen: dict[str, None] = {}
    for number, line, record in source.records():
        if isinstance(record, BadRecord):
            bad.append(BadRow(source.name, line, record.problem))
            continue
        if source.columns and isinstance(record, dict):
            seen.update(dict.fromkeys(record))
        try:
            messages, extra, _ = form.normalise(record, source.columns)
            refuse_halves({"messages": messages, **extra}, record)
        except Problem as problem:
            bad.append(BadRow(source.name, line, str(problem), problem.columns))
        else:
            good.append(number)
    if not good:
        here = {field: column for field, column in source.columns.items() if field not in seen}
        check_columns([source.name], here, list(seen))
    return good, bad, seen


def check_columns(names: Sequence[str], columns: Mapping[str, str], fields: Sequence[str]) -> None:
    """Raise DataError for a column that `columns` names and no record of these sources has; `fields` are those they
    have. One of several sources may have the field under its standard name."""
    for field_, column in columns.items():
        if fields and column not in fields:
            shown = list(dict.fromkeys(fields))
            there = ", ".join(shown[:12]) + (", ..." if len(shown) > 12 else "")
            all_ = names[0] if len(names) == 1 else f"The dataset ({', '.join(names)})"
            raise DataError(
                f"{all_} has no column {column!r}, which --columns {field_}={column} names.\nIt has: {there}."
            )


def _row(source: Source, line: int, record: Any, form: Form) -> Row:
    messages, extra, kind = form.normalise(record, source.columns)
    return Row(messages, source.name, line, extra, kind)


def parse_spec(spec: str) -> tuple[str, int | None]:
    """`train.jsonl#1000` -> (`train.jsonl`, 1000), unless a file has just that name."""
    match = re.fullmatch(r"(.+)#([^#/]*)", spec)
    if not match or Path(spec).exists():
        return spec, None
    if not match[2].isdecimal() or int(match[2]) == 0:
        raise DataError(f"{spec}: what follows '#' is the number of rows to take, such as {match[1]}#1000.")
    return match[1], int(match[2])


def pass_over(rows: Iterable[Row], bad: Sequence[BadRow], good: int, bad_rows: BadRows) -> None:
    """Handle rows found to be bad after they were read, next to `good` good ones: list them in `skipped`, or raise.

    Raises:
        DataError: `bad_rows` is `stop`, or no row is good.
    """
    if bad and bad_rows == "stop":
        raise DataError(describe_bad(bad, len(bad) + good, None))
    if bad and not good:
        raise DataError(none_left(bad))
    if isinstance(rows, Rows):
        rows.skipped.extend(bad)


def none_left(bad: Sequence[BadRow]) -> str:
    """The error message for when all rows are bad and would be left out."""
    return f"Nothing was left to train: {describe_bad(bad, len(bad), None, '')}"


def describe_bad(
    bad: Sequence[BadRow], total: int, form: Form | None, otherwise: str = ", or leave them out with --bad-rows skip"
) -> str:
    """The error message about bad rows. Without a form, it does not say what is expected; `otherwise`: an alternative
    to repairing them."""
    lines = [f"{len(bad)} of {total} row{'s' * (total > 1)} cannot be used:"]
    lines += [f"  {row}" for row in bad[:SHOWN]]
    if len(bad) > SHOWN:
        lines.append(f"  ... and {len(bad) - SHOWN} more")
    if form is not None:
        lines.append(f"Expected: {form.expected}")
    # In UTF-16, only the first line is recognisable, by its byte order mark; later lines are just not JSON.
    encoded = any("not UTF-8 text" in row.problem for row in bad)
    if encoded:
        lines.append(
            "Write the file in UTF-8: iconv -f ENCODING -t UTF-8 OLD > NEW, with GB18030 or UTF-16, for example."
        )
    if len(bad) < total or form is None:
        lines.append(f"Repair them{otherwise}.")
    elif not encoded:
        said = next((row.columns for row in bad if row.columns), "query=NAME,response=NAME")
        lines.append(f"If fields have other names, map them: --columns {said}")
    return "\n".join(lines)
