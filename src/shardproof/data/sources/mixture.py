"""Several datasets mixed into one, each with a share of the rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

Stopping = Literal["first_exhausted", "all_exhausted"]
T = TypeVar("T")


class Mixture(NamedTuple):
    """The share of each dataset, and when an epoch ends: when one dataset has no more rows, or when all have been read,
    with those that end earlier starting over."""

    shares: tuple[float, ...]
    stopping: Stopping = "first_exhausted"


def mixed(parts: Sequence[Sequence[T]], mixture: Mixture, seed: int) -> list[T]:
    """The rows of an epoch. Each part is shuffled first, so that the rows left out are not always those at its end."""
    import datasets

    rows = [row for part in parts for row in part]
    tables, first = [], 0
    for number, part in enumerate(parts):
        order = list(range(first, first := first + len(part)))
        random.Random(f"{seed} {number}").shuffle(order)
        tables.append(datasets.Dataset.from_dict({"row": order}))
    found = datasets.interleave_datasets(
        tables, probabilities=list(mixture.shares), seed=seed, stopping_strategy=mixture.stopping
    )
    return [rows[i] for i in found[:]["row"]]  # all at once: row by row takes ten times as long
