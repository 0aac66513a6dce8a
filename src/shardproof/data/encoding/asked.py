"""Encoded rows, split where their last answer begins: the prompt, and the reference answer.

This way a model is prompted with the same tokens as in training, whatever the template, and the tokens after the split
are the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from shardproof.data.encoding.encode import IGNORE
from shardproof.data.encoding.pack import LENGTHS
from shardproof.errors import DataError

Feature = Mapping[str, Any]


def last_answer(labels: Sequence[int]) -> tuple[int, int] | None:
    """Where the last run of learned tokens of a row begins and ends; None if there is none, or no question before
    it."""
    end = len(labels)
    while end and labels[end - 1] == IGNORE:
        end -= 1
    begin = end
    while begin and labels[begin - 1] != IGNORE:
        begin -= 1
    return (begin, end) if begin > 1 else None  # raw text has at most a begin-of-text token before it


def unpacked(rows: Any) -> Sequence[Feature]:
    """Encoded rows one by one, unpacked if they are packed."""
    if hasattr(rows, "unpacked"):
        found: Sequence[Feature] = rows.unpacked
        return found
    packed = LENGTHS in getattr(rows, "column_names", ())
    return [part for row in rows for part in _parts(row)] if packed else rows


def _parts(row: Feature) -> Iterator[Feature]:
    for begin, end in pairwise(accumulate(row[LENGTHS], initial=0)):
        yield {name: row[name][begin:end] for name in ("input_ids", "labels")}


def check_asks(rows: Any) -> None:
    """Raise DataError if no evaluation row asks anything."""
    if not any(last_answer(row["labels"]) for row in unpacked(rows)):
        raise DataError(
            "--predict-with-generate: no evaluation row asks anything, since every token in them is learned. Leave "
            "the option out, or give --val-dataset rows with questions."
        )
