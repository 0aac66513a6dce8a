"""The files and lines of rows."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardproof.data.rows import Row


class Places:
    """The places of rows, as `FILE:LINE`, in a few bytes each."""

    def __init__(self) -> None:
        self._sources: dict[str, int] = {}
        self._source, self._line = array("i"), array("q")

    @staticmethod
    def of(sources: Sequence[str], numbers: Any, lines: Any) -> Places:
        """The places of rows from sources with these numbers; `numbers` and `lines` are NumPy arrays."""
        made = Places()
        made._sources = {name: number for number, name in enumerate(sources)}
        made._source = array("i", numbers.astype("int32").tobytes())
        made._line = array("q", lines.astype("int64").tobytes())
        return made

    def extend(self, other: Places) -> None:
        """Append the places of `other`."""
        known = [self._sources.setdefault(name, len(self._sources)) for name in other._sources]
        self._source.extend(known[number] for number in other._source)
        self._line.extend(other._line)

    def append(self, row: Row) -> None:
        self._source.append(self._sources.setdefault(row.source, len(self._sources)))
        self._line.append(row.line)

    def __len__(self) -> int:
        return len(self._line)

    def __getitem__(self, index: int) -> str:
        return f"{list(self._sources)[self._source[index]]}:{self._line[index]}"

    def within(self, index: int) -> list[str]:
        """The places of all rows at this index: one, as nothing is packed."""
        return [self[index]]

    def by_source(self) -> dict[str, list[int]]:
        """The numbers of the rows of each source."""
        found: list[list[int]] = [[] for _ in self._sources]
        for number, source in enumerate(self._source):
            found[source].append(number)
        return {name: numbers for name, numbers in zip(self._sources, found, strict=True) if numbers}

    def in_order(self, numbers: Sequence[int]) -> Places:
        """The places in another order."""
        made = Places()
        made._sources = self._sources
        made._source, made._line = (array(a.typecode, (a[n] for n in numbers)) for a in (self._source, self._line))
        return made
