"""Promise: `keep_gathered` bytes of whole parameters stay from one use to the next, and no bit changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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


class Adapted(nn.Module):
    """A frozen layer, and an adapter beside it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(128, 128).requires_grad_(False)
        self.down, self.up = nn.Linear(128, rank, bias=False), nn.Linear(rank, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def gathers_of_adapters(rank: int, backwards: int) -> tuple[list[tuple[int, int]], list[bool]]:
    """What the first of five blocks gathers in each of three steps, in bases and adapters; and whether it holds its
    adapter before each step."""
    torch.manual_seed(0)
    model = shardproof.shard(nn.Sequential(*(Adapted(rank) for _ in range(5))), 3, units=[Adapted])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    adapter, base = 2 * 4 * 128 * rank, 4 * (128 * 128 + 128)
    counts, holds = [], []
    for step in range(3):
        before = shardproof.stats(model).units["0"]
        for _ in range(backwards):
            model(torch.ones(2, 128)).square().mean().backward()
        holds.append(adapter <= shardproof.stats(model).units["0"].gathered_bytes % base)
        optimizer.step()
        optimizer.zero_grad()
        after = shardproof.stats(model).units["0"]
        bases = (after.bytes_gathered - before.bytes_gathered) // base
        adapters = (after.gathers - before.gathers) - bases
        counts.append((bases, adapters))
        if step:
            assert after.bytes_gathered - before.bytes_gathered - bases * base < 1.1 * adapters * adapter
    return counts, holds


def test_an_adapter_is_gathered_once_a_step(run2):
    """A gather of so few bytes takes longer to begin than to carry out."""
    for counts, holds in run2(gathers_of_adapters, 1, 2):
        assert [adapters for _, adapters in counts] == [1, 1, 1]
        assert all(bases >= 2 for bases, _ in counts[1:])
        assert all(holds)


def test_one_of_large_rank_is_not(run2):
    for counts, holds in run2(gathers_of_adapters, 8, 2):
        assert [adapters for _, adapters in counts[1:]] == [4, 4]
        assert not any(holds)


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
