"""Encoded rows, cut where their last answer begins: what is asked, and what the right answer is.

So a model is asked with the tokens of training, of any template, and what stood behind the cut is the right answer.
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
    """Where the last learnt tokens of a row begin and end; None where there are none, or no question before them."""
    end = len(labels)
    while end and labels[end - 1] == IGNORE:
        end -= 1
    begin = end
    while begin and labels[begin - 1] != IGNORE:
        begin -= 1
    return (begin, end) if begin > 1 else None  # before raw text stands no more than the token that begins it


def unpacked(rows: Any) -> Sequence[Feature]:
    """Encoded rows one by one, where they are packed, too."""
    if hasattr(rows, "unpacked"):
        found: Sequence[Feature] = rows.unpacked
        return found
    packed = LENGTHS in getattr(rows, "column_names", ())
    return [part for row in rows for part in _parts(row)] if packed else rows


def _parts(row: Feature) -> Iterator[Feature]:
    for begin, end in pairwise(accumulate(row[LENGTHS], initial=0)):
        yield {name: row[name][begin:end] for name in ("input_ids", "labels")}


def check_asks(rows: Any) -> None:
    """Raise DataError where no row of an evaluation asks something."""
    if not any(last_answer(row["labels"]) for row in unpacked(rows)):
        raise DataError(
            "--predict-with-generate: no evaluation row asks anything, since every token in them is learned. Leave "
            "the option out, or give --val-dataset rows with questions."
        )
