"""Promise: `keep_gathered` bytes of whole parameters stay from one use to the next, and no bit changes."""

from __future__ import annotations

import pytest
import torch

import shardproof
from distributed.harness import Sharded, compare, train
from zero.graphs import CASES
from zero.models import FEATURES
from zero.test_stages import BLOCK_BYTES, Big, one_step

DEPTH = 6


class Keeping(Sharded):
    def __init__(self, nbytes: int) -> None:
        super().__init__(3)
        self.nbytes = nbytes

    def shard(self, model, **options):
        super().shard(model, keep_gathered=self.nbytes, **options)


def gathers(kept: int, frozen: bool, backwards: int) -> tuple[list[int], float, int]:
    """Gathers of blocks in each of four steps; the peak of gathered blocks, and how many are gathered at the end."""
    model = Big(DEPTH)
    model.blocks.requires_grad_(not frozen)
    shardproof.shard(model, 3, keep_gathered=int(1.05 * kept * BLOCK_BYTES))  # each is padded
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    counts = []
    for _ in range(4):
        before = shardproof.stats(model)
        for _ in range(backwards - 1):
            model(torch.ones(2, FEATURES)).square().mean().backward()
        one_step(model, optimizer)
        after = shardproof.stats(model)
        blocks = [name for name in after.units if name != "root"]
        counts.append(sum(after.units[name].gathers - before.units[name].gathers for name in blocks))
    whole = after.units["blocks.0"].gathered_peak_bytes
    peak = (after.total.gathered_peak_bytes - after.units["root"].gathered_peak_bytes) / whole
    return counts, peak, sum(after.units[name].gathered_bytes > 0 for name in blocks)


@pytest.mark.parametrize(
    ("kept", "frozen", "backwards", "expected"),
    [
        (0, False, 1, 11),  # each block for forward and for backward; the last one's gather serves both
        (2, False, 1, 8),  # and two more, and the one prefetched, stay until backward
        (9, False, 1, 6),
        (9, False, 3, 6),  # until a step has changed them
        (9, True, 1, 0),
        (2, True, 1, 4),
    ],
)
def test_what_is_kept_is_not_gathered_again(run2, kept, frozen, backwards, expected):
    for counts, peak, held in run2(gathers, kept, frozen, backwards):
        assert counts[-1] == expected, counts
        assert peak <= min(kept + 2, DEPTH)
        assert held == (min(kept + 2, DEPTH) if frozen else 0)


SOME = [
    "plain",
    "tied_embedding_and_head",
    "accumulation_with_no_sync",
    "checkpoint_selective",
    "inference_mode_between_forward_and_backward",
]


def with_and_without(graphs: list[str]) -> None:
    for graph in graphs:
        expected = train(CASES[graph], Sharded(3))
        for nbytes in (1_000, 10**9):
            compare(expected, train(CASES[graph], Keeping(nbytes)), tolerance=0)


@pytest.mark.parametrize(
    "graphs", [pytest.param(SOME, id="some"), pytest.param(list(CASES), id="all", marks=pytest.mark.slow)]
)
def test_it_changes_no_bit(run2, graphs):
    run2(with_and_without, graphs, timeout=600)
