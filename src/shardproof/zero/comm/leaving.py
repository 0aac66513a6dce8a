"""What leaves a machine: of the bytes that a rank moves, those that it sends to ranks on other machines."""

from __future__ import annotations

from collections.abc import Sequence


def part_to_others(hosts: Sequence[object], rank: int, direct: bool) -> float:
    """How much of the bytes of a gather or a reduce-scatter among ranks on `hosts` one of them sends to other machines.

    `direct`: each sends to each. Else they are a ring, which leaves each machine once, and the ranks of the machine
    share that; an all-reduce by such is twice as much.
    """
    count, here = len(hosts), sum(host == hosts[rank] for host in hosts)
    if count == here:
        return 0.0
    return (count - here) / count if direct else (count - 1) / count / here


class Leaving:
    """Bytes from one rank to other machines, by what moves.

    Args:
        hosts: the machine of each rank; empty where the others are imagined.
        rank: this one.
        row, column: the ranks that hold one copy of the model with it, and those that hold the same part.
        direct: whether what moves in the row goes from each rank to each.
    """

    def __init__(
        self, hosts: Sequence[str], rank: int, row: Sequence[int], column: Sequence[int], direct: bool
    ) -> None:
        def among(ranks: Sequence[int], straight: bool) -> float:
            return part_to_others([hosts[r] for r in ranks], list(ranks).index(rank), straight) if hosts else 0.0

        self._row, self._column = among(row, direct), among(column, False)
        self._everyone = among(range(len(hosts)), False)
        self._strangers = sum(host != hosts[rank] for host in hosts)
        self._ranks = max(len(hosts), 1)

    def in_row(self, nbytes: int) -> int:
        """A gather or a reduce-scatter of a buffer of `nbytes` in all."""
        return round(nbytes * self._row)

    def in_column(self, nbytes: int) -> int:
        """An all-reduce of `nbytes` over those that hold the same part."""
        return round(2 * nbytes * self._column)

    def over_all(self, nbytes: int) -> int:
        """An all-reduce of `nbytes` over all ranks."""
        return round(2 * nbytes * self._everyone)

    def unadded(self, nbytes: int, sharded: bool) -> int:
        """A reduction in which each rank sends each other one what that one adds, of `nbytes` in all."""
        return nbytes * self._strangers // (self._ranks if sharded else 1)
