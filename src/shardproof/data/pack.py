"""Several rows in one: what a batch would fill up with padding is filled with other rows.

A packed row is told apart by its position ids, which begin anew with each row in it. transformers' attention, of any
kind, keeps tokens of one row from seeing another by them alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardproof.data.encode import IGNORE
from shardproof.errors import ConfigError

if TYPE_CHECKING:
    import datasets

LENGTHS = "seq_lengths"  # of the rows in a packed row, in tokens; TRL's name for it


def pack_rows(dataset: datasets.Dataset, max_length: int | None) -> datasets.Dataset:
    """Put encoded rows together, the longest first into the fullest packed row that has room (TRL's best-fit
    decreasing, among every thousand rows).

    Args:
        dataset: what `encode_rows` gave: no row is longer than `max_length`.
        max_length: tokens of a packed row.

    Returns:
        A dataset with the columns `input_ids`, `labels` and `seq_lengths`, and the same `report`.

    Raises:
        ConfigError: no `max_length`.
    """
    from trl.data_utils import pack_dataset

    if max_length is None:
        raise ConfigError("--packing needs --max-length: it is the length of a packed row.")
    packed = pack_dataset(dataset, max_length, "bfd")
    packed.report = dataset.report  # type: ignore[attr-defined]
    if hasattr(dataset, "places"):
        packed.places = PackedPlaces(dataset, max_length, len(packed))  # type: ignore[attr-defined]
    return packed


class PackedPlaces:
    """Where the rows in packed rows stand. Which of them lie in which is found when somebody asks, by packing their
    numbers once more: lengths alone decide."""

    def __init__(self, dataset: Any, max_length: int, packed: int) -> None:
        self._places, self._max_length, self._packed = dataset.places, max_length, packed
        import pyarrow.compute as pc

        self._lengths = array("i", pc.list_value_length(dataset.data.column("input_ids")).to_pylist())

    def __len__(self) -> int:
        return self._packed

    @cached_property
    def _rows(self) -> Any:
        import datasets
        from trl.data_utils import pack_dataset

        numbers = ([i] * length for i, length in enumerate(self._lengths))
        return pack_dataset(datasets.Dataset.from_dict({"input_ids": list(numbers)}), self._max_length, "bfd")

    def within(self, index: int) -> list[str]:
        """Of all that is learnt at once."""
        return [self._places[number] for number in dict.fromkeys(self._rows[index]["input_ids"])]


def collate_packed(features: Sequence[Mapping[str, Sequence[int]]], pad_token_id: int) -> dict[str, Any]:
    """One batch of packed rows.

    Returns:
        `input_ids`, `position_ids` and `labels`, each int64 of shape (packed rows, length), no attention mask, and
        `use_cache=False`: with a cache, transformers does not look for packed rows. The first token of each row is
        never learnt: what stands before it is another row. Padding is at position 0, which makes each of its tokens a
        row by itself.
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
    return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels, "use_cache": False}


def tokens_in_packed(position_ids: Any) -> Any:
    """The tokens of a packed batch that are no padding, a scalar tensor where they lie: every row has a token at
    position 1, padding has none."""
    return position_ids.gt(0).sum() + position_ids.eq(1).sum()
