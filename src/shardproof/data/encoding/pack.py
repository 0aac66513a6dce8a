"""Several rows packed into one: space that would be padding in a batch is filled with other rows.

The rows in a packed row are told apart by their position ids, which restart at 0 with each row. From these alone, every
attention implementation of transformers keeps the tokens of one row from attending to another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardproof.data.encoding.encode import IGNORE
from shardproof.data.encoding.weights import batch_of_weights
from shardproof.errors import ConfigError

if TYPE_CHECKING:
    import datasets

    from shardproof.data.media.rows import MediaRows
    from shardproof.data.rows import Places, Row

_BLOCK = 10_000  # rows packed at a time: a multiple of the number that TRL packs together
LENGTHS = "seq_lengths"  # lengths in tokens of the rows in a packed row; TRL's name for it


def pack_rows(dataset: datasets.Dataset, max_length: int | None) -> datasets.Dataset:
    """Pack encoded rows, longest first, each into the fullest packed row that has room (TRL's best-fit decreasing,
    within every thousand rows).

    Args:
        dataset: the result of `encode_rows`: no row is longer than `max_length`.
        max_length: the length of a packed row, in tokens.

    Returns:
        A dataset with the columns `input_ids`, `labels` and `seq_lengths`, and the same `report`.

    Raises:
        ConfigError: `max_length` is missing.
    """
    from trl.data_utils import pack_dataset

    packed = pack_dataset(dataset, _checked(max_length), "bfd")
    packed.report = dataset.report  # type: ignore[attr-defined]
    if hasattr(dataset, "places"):
        packs = Packs(_lengths(dataset), _checked(max_length))
        packed.places = PackedPlaces(dataset.places, packs, len(packed))  # type: ignore[attr-defined]
    return packed


def _lengths(dataset: Any) -> list[int]:
    import pyarrow.compute as pc

    lengths: list[int] = pc.list_value_length(dataset.data.column("input_ids")).to_pylist()
    return lengths


class Packs(Sequence[list[int]]):
    """For each packed row, the numbers of the rows in it, computed from their lengths alone, on first access."""

    def __init__(self, lengths: Sequence[int], max_length: int) -> None:
        self._lengths, self._max_length = lengths, max_length

    @cached_property
    def _numbers(self) -> list[list[int]]:
        starts = range(0, len(self._lengths), _BLOCK)
        return [numbers for start in starts for numbers in self._of_block(start)]

    def _of_block(self, start: int) -> Iterator[list[int]]:
        """Packs stand-in rows whose tokens are their own row numbers."""
        import datasets
        import numpy as np
        import pyarrow as pa
        from trl.data_utils import pack_dataset

        lengths = np.array(self._lengths[start : start + _BLOCK])
        tokens = np.repeat(np.arange(start, start + len(lengths)), lengths)
        rows = pa.ListArray.from_arrays(np.concatenate([[0], lengths.cumsum()]).astype(np.int32), tokens)
        packed = pack_dataset(datasets.Dataset(pa.table({"input_ids": rows})), self._max_length, "bfd")
        return (list(dict.fromkeys(row)) for row in packed["input_ids"])

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return self._numbers[index]


class PackedPlaces:
    """The places of the rows in packed rows."""

    def __init__(self, places: Places, packs: Packs, length: int) -> None:
        self._places, self._packs, self._length = places, packs, length

    def __len__(self) -> int:
        return self._length

    def within(self, index: int) -> list[str]:
        """The places of all rows in one packed row."""
        return [self._places[number] for number in self._packs[index]]


class PackedMediaRows(Sequence[dict[str, Any]]):
    """Packed rows with files. An element has `rows`, a list of elements of `MediaRows`.

    Args:
        unpacked: the rows, none of which is longer than `max_length`.
        max_length: the length of a packed row, in tokens.

    Attributes:
        report, places: as for `pack_rows`.

    Raises:
        ConfigError: `max_length` is missing.
    """

    def __init__(self, unpacked: MediaRows, max_length: int | None) -> None:
        self.unpacked, self.report = unpacked, unpacked.report
        self.packs = Packs(_lengths(unpacked.encoded), _checked(max_length))
        self.places = PackedPlaces(unpacked.places, self.packs, len(self.packs))

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: Any) -> Any:
        return {"rows": [self.unpacked[number] for number in self.packs[int(index)]]}

    @property
    def rows(self) -> Iterator[Row]:
        """The rows as they were read."""
        return self.unpacked.rows

    def few(self) -> list[dict[str, Any]]:
        """Packed rows of two rows each, see `MediaRows.few`."""
        return [{"rows": pair} for pair in self.unpacked.few(2)]


def _checked(max_length: int | None) -> int:
    if max_length is None:
        raise ConfigError("--packing needs --max-length: it is the length of a packed row.")
    return max_length


def collate_packed(
    features: Sequence[Mapping[str, Sequence[int]]], pad_token_id: int, flat: bool = False
) -> dict[str, Any]:
    """One batch of packed rows.

    Args:
        flat: whether to concatenate them into one, see `wants_flat`.

    Returns:
        `input_ids`, `position_ids` and `labels`, each int64 of shape (packed rows, length), `token_weights` (see
        `batch_of_weights`), no attention mask, and `use_cache=False`: with a cache, transformers does not look for
        packed rows. The first token of each row is never learned, since the text before it belongs to another row.
        Padding has position 0, which makes each padding token a row by itself.
    """
    import torch

    length = max(len(feature["input_ids"]) for feature in features)
    input_ids = torch.full((len(features), length), pad_token_id)
    position_ids = torch.zeros((len(features), length), dtype=torch.int64)
    labels = torch.full((len(features), length), IGNORE)
    for i, feature in enumerate(features):
        n = len(feature["input_ids"])
        input_ids[i, :n] = torch.as_tensor(feature["input_ids"])
        labels[i, :n] = torch.as_tensor(feature["labels"])
        start = 0
        for size in feature[LENGTHS]:
            position_ids[i, start : start + size] = torch.arange(size)
            labels[i, start] = IGNORE
            start += size
    batch = {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}
    batch |= batch_of_weights(features, labels)
    return {name: value.view(1, -1) if flat else value for name, value in batch.items()} | {"use_cache": False}


def wants_flat(attention: str) -> bool:
    """Whether this attention implementation of transformers tells packed rows apart only if a batch is a single packed
    row, like FlashAttention. For any other, a single row would mean computing all pairs of tokens of the batch."""
    return "flash" in attention


def tokens_in_packed(position_ids: Any) -> Any:
    """The number of non-padding tokens of a packed batch, a scalar tensor on the same device: every row has a token at
    position 1, padding has none."""
    return position_ids.gt(0).sum() + position_ids.eq(1).sum()
