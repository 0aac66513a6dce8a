"""Token ids and labels of rows as they become a dataset."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets

_CHUNK = 1 << 24  # tokens in one Arrow chunk


class Columns:
    """Token ids and labels, four bytes each, as the chunks of an Arrow table."""

    def __init__(self) -> None:
        self._chunks: list[Any] = []
        self._start()

    def _start(self) -> None:
        self._ids, self._labels, self._offsets = array("i"), array("i"), array("i", [0])

    def append(self, ids: Sequence[int], labels: Sequence[int]) -> None:
        self._ids.extend(ids)
        self._labels.extend(labels)
        self._offsets.append(len(self._ids))
        if len(self._ids) >= _CHUNK:
            self._close()

    def _close(self) -> None:
        import numpy as np
        import pyarrow as pa

        offsets, *values = (np.frombuffer(a, dtype=np.int32) for a in (self._offsets, self._ids, self._labels))
        lists = [pa.ListArray.from_arrays(pa.array(offsets), pa.array(column)) for column in values]
        self._chunks.append(pa.table(lists, names=["input_ids", "labels"]))
        self._start()

    def dataset(self) -> datasets.Dataset:
        import datasets
        import pyarrow as pa

        if len(self._offsets) > 1:
            self._close()
        return datasets.Dataset(pa.concat_tables(self._chunks))
