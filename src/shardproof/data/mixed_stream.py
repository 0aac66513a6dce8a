"""Streams of datasets, one after the other, or mixed by given shares.

[Note: draws] The dataset that each row comes from is drawn block by block, from the seed, the pass and the number of
the block. So every rank that reads the stream draws the same datasets, and a checkpoint need not store the state of the
draw, only how far each dataset was read.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardproof.data.forms.formats import SUPERVISED, Form
from shardproof.data.rows import BadRow, BadRows, Row
from shardproof.data.sources.mixture import Mixture
from shardproof.data.stream import DEFAULT_SIZE, Place, Read, RowStream
from shardproof.errors import DataError


class _Told(NamedTuple):
    """How far a dataset was read in a pass: the number of records, the position, and whether its end was reached."""

    records: int = 0
    at: Any = None
    through: bool = False


class MixedStream(RowStream):
    """Rows of several sources; the source of each next row is drawn ([Note: draws])."""

    def __init__(
        self,
        names: Sequence[str],
        mixture: Mixture,
        seed: int,
        size: int = DEFAULT_SIZE,
        columns: Mapping[str, str] | None = None,
        form: Form = SUPERVISED,
    ) -> None:
        super().__init__(names, size, columns, form)
        self._mixture, self._seed = mixture, seed
        self._readings: dict[int, Any] = {}  # each source's reading, with the iterator over it

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_readings": {}}

    def read(self, place: Place) -> Read:
        if place.passes < 0:  # `look` reads one source
            return super().read(place)
        if place != self._open:
            self._readings = {}
        told = [_Told(*said) for said in place.at] if place.at else [_Told() for _ in self._sources]
        chance = random.Random(f"{self._seed} {place.passes} {place.block}")
        rows: list[Row] = []
        bad: list[BadRow] = []
        for number in chance.choices(range(len(told)), self._mixture.shares, k=self._size):
            found = self._drawn(number, told)
            if found is None:
                self._open = None
                return Read(rows, bad, Place(place.passes + 1))
            row = self._checked(number, *found)
            (rows if isinstance(row, Row) else bad).append(row)  # type: ignore[arg-type]
        for number, (reading, _) in self._readings.items():
            told[number] = told[number]._replace(at=reading.at())
        after = Place(place.passes, place.block + 1, at=[list(said) for said in told])
        self._open = after
        return Read(rows, bad, after)

    def _drawn(self, number: int, told: list[_Told]) -> tuple[int, Any] | None:
        """Line and content of the next record of a source, or None where the pass ends."""
        found = self._next_of(number, told[number])
        if found is None:
            told[number] = _Told(through=True)
            self._readings.pop(number, None)
            if self._mixture.stopping == "first_exhausted" or all(said.through for said in told):
                return None
            found = self._next_of(number, told[number])
        told[number] = told[number]._replace(records=told[number].records + 1)
        return found

    def _next_of(self, number: int, told: _Told) -> tuple[int, Any] | None:
        limit = self._limits[number]
        if limit is not None and told.records >= limit:
            return None
        if number not in self._readings:
            reading = self._sources[number].reading(told.at)
            self._readings[number] = reading, iter(reading)
        found: tuple[int, Any] | None = next(self._readings[number][1], None)
        return found


def read_stream(
    names: Sequence[str | Path],
    *,
    size: int = DEFAULT_SIZE,
    bad_rows: BadRows = "stop",
    seed: int = 0,
    columns: Mapping[str, str] | None = None,
    form: Form = SUPERVISED,
    mixture: Mixture | None = None,
) -> RowStream:
    """Rows read in blocks of `size`. The first block of each file is checked at once.

    Args:
        names, bad_rows, columns, form: as for `read_rows`; `NAME#1000` takes the first 1000 rows in each pass.
        seed: seeds the draws of a mixture.
        mixture: each source's share of the rows; without it, the sources follow one another.

    Raises:
        DataError: a file is missing or cannot be streamed, or its first rows are bad.
    """
    if not names:
        raise DataError("No dataset was named. Name a file, or 'stdlib' for the embedded rows.")
    given = [str(name) for name in names]
    if mixture is None:
        stream = RowStream(given, size, columns, form)
    else:
        stream = MixedStream(given, mixture, seed, size, columns, form)
    stream.look(bad_rows)
    return stream
