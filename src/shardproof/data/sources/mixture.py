"""Several datasets as one, in which each has a share of the rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

Stopping = Literal["first_exhausted", "all_exhausted"]
T = TypeVar("T")


class Mixture(NamedTuple):
    """Of each dataset its share, and when an epoch ends: when one dataset has no more rows, or when each has been
    through, for which those that are through begin anew."""

    shares: tuple[float, ...]
    stopping: Stopping = "first_exhausted"


def mixed(parts: Sequence[Sequence[T]], mixture: Mixture, seed: int) -> list[T]:
    """The rows of an epoch. Each part is shuffled first: what is left out of one is not its end."""
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
    return [rows[i] for i in found[:]["row"]]  # at once: row by row takes ten times as long
