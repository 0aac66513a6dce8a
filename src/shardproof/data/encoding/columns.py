"""Token ids, labels and (if any) weights of rows, collected into a dataset."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardproof.data.encoding.weights import WEIGHTS

if TYPE_CHECKING:
    import datasets

_CHUNK = 1 << 24  # tokens in one Arrow chunk
NAMES = {"input_ids": "i", "labels": "i", WEIGHTS: "f"}  # columns, and the types of their arrays


class Columns:
    """Token ids and labels, four bytes each, as chunks of an Arrow table; and weights, if any row has them."""

    def __init__(self) -> None:
        self._chunks: list[Any] = []
        self._start()

    def _start(self) -> None:
        self._ids, self._labels, self._offsets = array("i"), array("i"), array("i", [0])
        self._weights: array[float] | None = None

    def append(self, ids: Sequence[int], labels: Sequence[int], weights: Sequence[float] | None = None) -> None:
        if weights is not None and self._weights is None:
            self._weights = array("f", [1.0]) * len(self._ids)
        if self._weights is not None:
            self._weights.extend([1.0] * len(ids) if weights is None else weights)
        self._ids.extend(ids)
        self._labels.extend(labels)
        self._offsets.append(len(self._ids))
        if len(self._ids) >= _CHUNK:
            self._close()

    def _close(self) -> None:
        import numpy as np
        import pyarrow as pa

        offsets = pa.array(np.frombuffer(self._offsets, dtype=np.int32))
        columns = zip(NAMES.items(), (self._ids, self._labels, self._weights), strict=True)
        values = {name: np.frombuffer(a, dtype=code) for (name, code), a in columns if a is not None}
        self._chunks.append(
            pa.table({name: pa.ListArray.from_arrays(offsets, pa.array(column)) for name, column in values.items()})
        )
        self._start()

    def dataset(self) -> datasets.Dataset:
        import datasets
        import pyarrow as pa

        if len(self._offsets) > 1:
            self._close()
        if any(WEIGHTS in chunk.column_names for chunk in self._chunks):
            self._chunks = [_with_ones(chunk) for chunk in self._chunks]
        return datasets.Dataset(pa.concat_tables(self._chunks))


def with_weights(parts: Sequence[datasets.Dataset]) -> list[datasets.Dataset]:
    """The same datasets, all with weights if any of them has weights."""
    if not any(WEIGHTS in part.column_names for part in parts):
        return list(parts)
    return [type(part)(_with_ones(part.data.table)) for part in parts]


def _with_ones(table: Any) -> Any:
    """A table with weights for its tokens, all 1 if it had none."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute

    if WEIGHTS in table.column_names:
        return table
    chunks = []
    for ids in table.column("input_ids").chunks:
        ends = pyarrow.compute.list_value_length(ids).to_numpy().cumsum(dtype=np.int32)
        ones = pa.array(np.ones(ends[-1] if len(ends) else 0, dtype=np.float32))
        chunks.append(pa.ListArray.from_arrays(pa.array(np.concatenate([[0], ends]).astype(np.int32)), ones))
    return table.append_column(WEIGHTS, pa.chunked_array(chunks, type=pa.list_(pa.float32())))
