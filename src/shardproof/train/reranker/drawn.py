"""Draws some of the texts of a row in each pass over the rows, if it has many."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardproof.data.forms.matches import NEGATIVE, POSITIVE
from shardproof.data.rows import Row


class DrawnPairs(Sequence[dict[str, Any]]):
    """Encoded rows of pairs with at most a given number of positives and negatives in each pass over the rows. The draw
    depends only on seed, pass and row, so it is the same on any number of processes and in a resumed run.

    Args:
        rows: the result of `encode` in the recipe, with all its attributes.
        positives, negatives: the most of each; None for all.
    """

    def __init__(self, rows: Any, positives: int | None, negatives: int | None, seed: int) -> None:
        self._rows, self._most, self._seed, self._epoch = rows, (negatives, positives), seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Start another pass over the rows."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._rows)

    def __getattr__(self, name: str) -> Any:
        # Methods that get many rows at once, as loaders use with `datasets`, would bypass the draw.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._rows, name)

    def __getitem__(self, index: Any) -> Any:
        row = self._rows[int(index)]
        chance = random.Random(f"{self._seed} {self._epoch} {int(index)}")
        places: list[list[int]] = [[], []]
        for place, label in enumerate(row["labels"]):
            places[int(label)].append(place)
        drawn = [
            those if most is None or most >= len(those) else sorted(chance.sample(those, most))
            for those, most in zip(places, self._most, strict=True)
        ]
        return _of(row, sorted(drawn[0] + drawn[1]))


def _of(row: dict[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """The row with only the pairs at these places."""
    if len(places) == len(row["labels"]):
        return row
    ends = [sum(row["lengths"][: place + 1]) for place in range(len(row["lengths"]))]
    ids = [token for place in places for token in row["input_ids"][ends[place] - row["lengths"][place] : ends[place]]]
    each: dict[str, Any] = {
        name: [row[name][place] for place in places] for name in ("lengths", "labels", "seconds") if name in row
    }
    whole = {"row": _texts_of(row["row"], places)} if "row" in row else {}
    return {**row, "input_ids": ids, **each, **whole}


def _texts_of(row: Row, places: Sequence[int]) -> Row:
    """The row as it was read, which is used to read files, with only the texts at these places."""
    found = {name: row.extra[name] for name in (POSITIVE, NEGATIVE)}
    first = len(found[POSITIVE])
    some = {
        POSITIVE: [found[POSITIVE][place] for place in places if place < first],
        NEGATIVE: [found[NEGATIVE][place - first] for place in places if place >= first],
    }
    return replace(row, extra=row.extra | some)
