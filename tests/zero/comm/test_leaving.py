"""Promise: bytes that leave a machine are counted, by how they travel."""

from __future__ import annotations

import pytest

from shardproof.zero.comm.leaving import Leaving, part_to_others

TWO_BY_TWO = ["a", "a", "b", "b"]


def test_what_goes_from_each_to_each_and_around_a_ring():
    assert part_to_others(TWO_BY_TWO, 0, direct=True) == 2 / 4
    assert part_to_others(TWO_BY_TWO, 0, direct=False) == 3 / 4 / 2, (
        "a ring leaves a machine once, for both of its ranks"
    )
    assert part_to_others(["a", "b", "b"], 0, direct=True) == 2 / 3
    assert part_to_others(["a"] * 4, 2, direct=True) == 0


@pytest.mark.parametrize("rank", range(4))
def test_copies_in_machines_send_their_part_of_the_gradients(rank):
    row = [0, 1] if rank < 2 else [2, 3]
    copies = Leaving(TWO_BY_TWO, rank, row, [rank % 2, rank % 2 + 2], direct=True)
    assert copies.in_row(1000) == 0
    assert copies.in_column(500) == 500, "an all-reduce over two ranks sends a half twice"
    one = Leaving(TWO_BY_TWO, rank, range(4), [rank], direct=True)
    assert (one.in_row(1000), one.in_column(500)) == (500, 0)
    assert one.over_all(1000) == 750
    assert (one.unadded(1000, sharded=True), one.unadded(1000, sharded=False)) == (500, 2000)


def test_where_the_others_are_imagined_nothing_is_known():
    nobody = Leaving([], 0, range(64), [0], direct=False)
    assert (nobody.in_row(1000), nobody.over_all(1000), nobody.unadded(1000, sharded=True)) == (0, 0, 0)
