"""Sources of rows that were read and checked before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardproof.data.rows import Row


SAID = "cached.json"  # the metadata file in a folder of encoded rows


class RowSource:
    """A source whose records are already rows, each with the checksum of its original record: see cached.py."""

    name: str
    columns: dict[str, str]

    def __len__(self) -> int:
        raise NotImplementedError

    def records(self) -> Iterator[tuple[int, int, Any]]:
        """As for any source."""
        raise NotImplementedError

    def record(self, number: int) -> tuple[int, Any]:
        """As for any source."""
        raise NotImplementedError

    def row(self, number: int) -> Row:
        """One of its rows."""
        raise NotImplementedError

    def place(self, number: int) -> tuple[str, int]:
        """The original file and line of one of its rows."""
        raise NotImplementedError

    def checksum(self, number: int) -> int:
        """Four bytes, see `Rows.checksums`."""
        raise NotImplementedError
