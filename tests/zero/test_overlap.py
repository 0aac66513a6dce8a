"""Promise: that gathers and reductions run beside the computing changes no bit, and moves no byte more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardproof
from distributed.harness import Sharded, compare, train
from shardproof.zero import exposed
from shardproof.zero.schedule import gradients
from shardproof.zero.schedule.engine import Engine
from zero.graphs import CASES
from zero.test_stages import Big, one_step


class OneAfterTheOther:
    """Inside, nothing is gathered before it is needed, and each reduction is waited for where it begins."""

    def __enter__(self) -> None:
        self.before = Engine._prefetch, gradients.REDUCTIONS_IN_FLIGHT
        Engine._prefetch = lambda *args: None  # type: ignore[method-assign]
        gradients.REDUCTIONS_IN_FLIGHT = 0

    def __exit__(self, *args: Any) -> None:
        Engine._prefetch, gradients.REDUCTIONS_IN_FLIGHT = self.before  # type: ignore[method-assign]


SOME = ["plain", "tied_embedding_and_head", "accumulation_with_no_sync", "checkpoint_selective"]


def with_and_without(graphs: list[str], stage: int) -> None:
    for graph in graphs:
        with OneAfterTheOther():
            expected = train(CASES[graph], Sharded(stage))
        compare(expected, train(CASES[graph], Sharded(stage)), tolerance=0)


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "graphs", [pytest.param(SOME, id="some"), pytest.param(list(CASES), id="all", marks=pytest.mark.slow)]
)
def test_overlap_on_and_off_give_the_same_bits(run2, graphs, stage):
    run2(with_and_without, graphs, stage, timeout=600)


def moved(stage: int, overlap: bool) -> dict[str, Any]:
    """What a step of a settled model moves, in bytes, and what its parameters are."""
    torch.manual_seed(0)
    model = shardproof.shard(Big(4), stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    told = []
    for _ in range(5):
        if overlap:
            one_step(model, optimizer)
        else:
            with OneAfterTheOther():
                one_step(model, optimizer)
        told.append(shardproof.stats(model))
    before, after = told[-2:]
    sizes = {name: unit.shard_bytes * (2 if stage else 1) for name, unit in after.units.items()}
    sent = {
        name: unit.bytes_gathered
        + unit.bytes_reduced
        - before.units[name].bytes_gathered
        - before.units[name].bytes_reduced
        for name, unit in after.units.items()
    }
    hits = after.total.prefetch_hits - before.total.prefetch_hits
    exposed = [stats.exposed_seconds for stats in told]
    assert exposed == sorted(exposed)
    return {"times": {name: sent[name] / sizes[name] for name in sizes}, "hits": hits, "exposed": exposed[-1]}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_moves_twice_or_three_times_the_parameters(run2, stage):
    """A gather after the step is included: it is that of the next forward. At stage 3 the root, and the block that
    forward leaves last and backward enters first, are gathered once."""
    twice = ["root", "blocks.3"] if stage == 3 else ["root", *(f"blocks.{i}" for i in range(4))]
    for overlap in (True, False):
        for found in run2(moved, stage, overlap):
            assert found["times"] == {n: 2 if n in twice else 3 for n in found["times"]}
            assert (found["hits"] > 0) == (overlap and stage > 0)
            assert found["exposed"] > 0


def test_one_rank_waits_for_nothing():
    model = shardproof.shard(Big(2), 3)
    one_step(model, torch.optim.AdamW(model.parameters()))
    assert shardproof.stats(model).exposed_seconds == 0.0


class Seconds:
    """A clock by which each moment is a second after the one before."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        self.now += 1
        return self.now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def test_each_wait_is_added_up_once_however_many_there_are(monkeypatch):
    """And no more of them are kept than so many, if nobody ever asks."""
    monkeypatch.setattr(exposed, "AT_ONCE", 4)
    found = exposed.Exposed(torch.device("cpu"))
    found.clock = Seconds()
    for _ in range(11):
        with found.waits():
            pass
        assert len(found._waits) <= 4
    assert [found.seconds(), found.seconds()] == [11.0, 11.0]
