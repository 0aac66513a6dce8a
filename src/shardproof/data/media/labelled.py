"""Rows with labels, or pairs to be scored, with images, audio and video, for a model with a processor and a head.

Inputs are as in [Note: what a classifier reads] in labelled.py, and [Note: what is judged] in rank.py. As in
media/encode.py, rows go through the processor once before training, and again when a batch is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardproof.data.encoding.labelled import tensor_of
from shardproof.data.encoding.rank import relevances
from shardproof.data.encoding.report import Truncation
from shardproof.data.forms.formats import with_system
from shardproof.data.forms.labels import LABEL, Label, Labels
from shardproof.data.forms.matches import NEGATIVE, POSITIVE, turns_of_found
from shardproof.data.media.batches import OnLost
from shardproof.data.media.embed import MediaMatchCollator, MediaMatchEncoder, Read
from shardproof.data.media.judged import joined
from shardproof.data.rows import Row


class MediaLabelledEncoder(MediaMatchEncoder):
    """Rows to token ids, including those of files, and to batches."""

    answered = True

    def conversations(self, row: Row) -> list[Row]:
        """The row itself, after the system message."""
        return [replace(row, messages=with_system(row.messages, self._before_queries))]

    def ids(self, rows: Iterable[Row]) -> Iterator[tuple[Row, tuple[Sequence[int], Label | None] | str]]:
        for row, made in self.texts(rows):
            yield row, made if isinstance(made, str) else (made[0], row.extra.get(LABEL))

    def fitted(self, row: Row, ids: Sequence[int], most: int | None, truncation: Truncation) -> list[int]:
        """The ids, unchanged: rows with files are never cut."""
        return list(ids)


class MediaLabelledCollator(MediaMatchCollator):
    """Batches of rows with files, like those of `collate_labelled`, with the tensors of the files."""

    def __init__(self, encoder: MediaLabelledEncoder, names: Labels, on_lost: OnLost = "skip") -> None:
        super().__init__(encoder, on_lost)
        self.names = names

    def laid_out(self, each: Sequence[Sequence[Read]]) -> list[Read]:
        return [text for texts in each for text in texts]

    def labels(self, rows: Sequence[Mapping[str, Any]], laid_out: Sequence[Read], mask: Any) -> Any:
        return tensor_of([row["labels"] for row in rows], self.names)


class MediaPairEncoder(MediaMatchEncoder):
    """Rows to the token ids of the query with each of its positives and negatives, including those of files."""

    answered = True

    def conversations(self, row: Row) -> list[Row]:
        """Each pair of a row, as a row of question and answer."""
        turns = with_system(row.messages, self._before_queries)
        found = [joined(turns_of_found(one)) for one in (*row.extra[POSITIVE], *row.extra[NEGATIVE])]
        return [Row([*turns, {"role": "assistant", "content": one}], row.source, row.line) for one in found]

    def columns(self, row: Row, made: Sequence[Any], *_: Any) -> dict[str, Any]:
        """`labels`, 1 for a positive and 0 for a negative."""
        return {"labels": relevances(row)}
