"""Promise: a watcher hears of each gather and reduction once, in order, and its being there changes nothing."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardproof
from zero.models import FEATURES, Net
from zero.test_dynamic import Omni
from zero.test_plans import UNUSUAL, run


class Heard:
    def __init__(self) -> None:
        self.wanted_names: Counter[tuple[int, str]] = Counter()
        self.open: Counter[int] = Counter()
        self.waited = self.lent = 0
        self.met: list[str] = []
        self.inside = False

    def wanted(self, flat, operation: int) -> None:
        self.wanted_names[operation % 2, flat.unit.name] += 1
        self.open[operation] += 1

    @contextmanager
    def waits(self, operation: int) -> Iterator[None]:
        assert not self.inside
        self.inside = True
        yield
        self.inside = False
        if self.open[operation]:
            self.open[operation] -= 1
            self.waited += 1
        else:
            self.lent += 1

    @contextmanager
    def meets(self, what: str) -> Iterator[None]:
        yield
        self.met.append(what)


def watched(stage: int, name: str) -> None:
    torch.manual_seed(0)
    plain = shardproof.shard(copy.deepcopy(model := Omni()), stage)
    model = shardproof.shard(model, stage)
    heard = model._shardproof.watcher = Heard()
    ranks, stats = [dist.get_rank()], []
    assert run(model, UNUSUAL[name], ranks, 1.0, True, stats) == run(plain, UNUSUAL[name], ranks, 1.0, True, [])
    for unit, told in stats[-1].units.items():
        assert heard.wanted_names[0, unit] == told.gathers
        assert heard.wanted_names[1, unit] == told.reductions
    last = sum(heard.open.values())  # gathers that were begun for a step to come
    assert heard.waited == stats[-1].total.gathers + stats[-1].total.reductions - last
    assert last <= 3
    assert heard.met.count("update the parameters") == 13
    assert len(set(heard.met)) >= 2


@pytest.mark.parametrize("stage", [0, 3])
def test_every_operation_is_heard_of_once(run2, stage: int) -> None:
    run2(watched, stage, "a_tower_on_one_rank")


def profiled(stage: int) -> None:
    """Each time something awaits a word from the other rank, or has sent one, when the profiler ends."""
    for _ in range(20):
        model = shardproof.shard(Net(), stage)
        optimizer = torch.optim.AdamW(model.parameters())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True):
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.ones(2, FEATURES)).sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_the_profiler_of_torch_can_be_started_again_and_again(run2, stage: int) -> None:
    run2(profiled, stage)


def trained_unrecorded(stage: int) -> None:
    """Recording is a switch of the thread, and what a profiler finds tells how it stands."""
    model = shardproof.shard(Net(), stage)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.autograd._enable_record_function(False)
    try:
        for _ in range(4):
            model(torch.ones(2, FEATURES)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert shardproof.stats(model).votes
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.ones(2).add(1)
        assert not [event.key for event in profile.key_averages() if event.key.startswith("aten::")]
    finally:
        torch.autograd._enable_record_function(True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(2).add(1)
    assert [event.key for event in profile.key_averages() if event.key.startswith("aten::")]


def test_who_has_switched_recording_off_finds_it_off(run2) -> None:
    run2(trained_unrecorded, 3)
