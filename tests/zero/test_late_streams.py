"""Promise: the host waits for an accelerator only where it must, and a stream waits for what it reads."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import shardproof
from distributed.harness import Sharded, compare, train
from distributed.late_streams import LateStreams, late_streams
from distributed.two_devices import DEVICE, HOST
from shardproof.zero.schedule import home
from zero.test_offload import with_offload

# --- the streams of these tests -------------------------------------------------------------------


def test_what_is_queued_beside_the_computing_is_not_there_until_it_is_waited_for():
    with late_streams():
        place = home.Home(HOST, DEVICE, frozen=True)
        place.queues = True
        here = place.place(torch.ones(3, device=DEVICE), torch.float32)
        assert here.isnan().all()
        place.settle()
        assert here.eq(1).all()
        with place.incoming():
            there = place.bring(here, torch.bfloat16)
        assert there.isnan().all()
        place.arrival().wait()
        assert there.eq(1).all()


def test_what_a_stream_still_has_to_read_must_be_held():
    with late_streams():
        place = home.Home(HOST, DEVICE, frozen=True)
        place.queues = True
        place.place(torch.ones(3, device=DEVICE), torch.float32)
        place._landing.clear()
        with pytest.raises(AssertionError, match="let go"):
            place.settle()


# --- numbers ----------------------------------------------------------------------------------------

GRAPHS = [
    "plain",
    "accumulation_with_no_sync",
    "tied_embedding_and_head",
    "checkpoint_of_a_block_used_twice_nonreentrant",
    "edit_by_masks_and_foreach",
    "backward_with_create_graph",
]


def late(stage: int, offload: str, graphs: list[str], **options: Any) -> None:
    for graph in graphs:
        usual = train(with_offload(graph, None, **options), Sharded(stage))
        with late_streams():
            compare(usual, train(with_offload(graph, offload, device=DEVICE, **options), Sharded(stage)), tolerance=0)


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["optimizer", "all"])
@pytest.mark.parametrize("stage", [0, 3])
def test_late_copies_change_no_bit(stage, offload):
    late(stage, offload, GRAPHS)


@pytest.mark.parametrize("offload", ["optimizer", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_late_copies_change_no_bit_on_two_ranks(run2, stage, offload):
    run2(late, stage, offload, GRAPHS[:2])


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_files_are_copied_by_way_of_page_locked_memory(tmp_path, monkeypatch, precision):
    """To and from other memory a copy waits for the device, or the device for it."""
    crossed: set[int] = set()
    places: set[home.Home] = set()

    def note(mode: LateStreams, name: str, args: Any, kwargs: Any, noted: Any = LateStreams._note) -> None:
        noted(mode, name, args, kwargs)
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        there = {mode.place_of(t) for t in tensors} | ({DEVICE.index} if kwargs.get("device") == DEVICE else set())
        beside = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
        if beside and len(there - {None}) > 1:
            crossed.update(t.untyped_storage().data_ptr() for t in tensors if mode.place_of(t) == HOST.index)

    def settle(place: home.Home, settled: Any = home.Home.settle) -> None:
        places.add(place)
        settled(place)

    monkeypatch.setattr(LateStreams, "_note", note)
    monkeypatch.setattr(home.Home, "settle", settle)
    late(3, f"nvme:{tmp_path}", GRAPHS[:3], mixed_precision=precision)
    files = set().union(*(place._addresses for place in places))
    assert files
    assert crossed
    assert not files & crossed


@pytest.mark.sampled
@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_nor_in_bf16(offload):
    graphs = ["plain", "accumulation_with_no_sync", "edit_by_masks_and_foreach"]
    late(3, offload, graphs, mixed_precision=torch.bfloat16)


class Deep(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(length))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_a_gradient_that_was_kept_has_what_was_added_since():
    with late_streams():
        model = shardproof.shard(Deep(3), 3, device=DEVICE, offload="all")
        x = torch.ones(2, 16, device=DEVICE)
        model(x).sum().backward()
        kept = [p.grad for p in model.parameters()]
        once = [float(g.norm()) for g in kept]
        model(x).sum().backward()
        assert [float(g.local.norm()) for g in kept] == pytest.approx([2 * norm for norm in once])


# --- what the host waits for -------------------------------------------------------------------------


def waits(stage: int, offload: str | None, length: int, micros: int, **options: Any) -> Counter[str]:
    """Of a step, when everything is settled."""
    torch.manual_seed(0)
    with late_streams() as mode:
        options |= {"device": DEVICE, "offload": offload, "mixed_precision": torch.bfloat16}
        model = shardproof.shard(Deep(length), stage, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for _ in range(11):  # the first of an optimizer is watched, and forwards of the first ten are
            mode.waits.clear()
            for _ in range(micros):
                model(torch.ones(2, 16, device=DEVICE)).float().square().mean().backward()
            shardproof.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return mode.waits


def test_a_look_at_a_number_is_counted():
    with late_streams() as mode:
        x = torch.ones(3, device=DEVICE)
        float(x.sum())
        x[x > 0]
        x.to(HOST)
        torch.ones(3, device=HOST).to(DEVICE, non_blocking=True)
    assert mode.waits == {"_local_scalar_dense": 1, "index": 1, "_to_copy": 1}


@pytest.mark.sampled
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])
def test_the_host_waits_for_nothing(run, stage, world):
    assert run(world, waits, stage, None, 3, 2) == [{}] * world


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("offload", ["optimizer", "all"])
@pytest.mark.parametrize("stage", [0, 3])
def test_with_offload_the_host_waits_as_often_for_many_blocks_as_for_few(run, stage, offload, world):
    """For what was brought and what went home, once, and for the factor of clipping, which is multiplied there. What
    gradients of another micro-batch are added to is waited for, too, two copies behind."""
    few, many = (run(world, waits, stage, offload, length, 1) for length in (3, 8))
    assert few == many == [{"synchronize": 2, "_to_copy": 1}] * world
    few, many = (run(world, waits, stage, offload, length, 2)[0] for length in (3, 8))
    assert few["_to_copy"] == many["_to_copy"] == 1
    assert many["synchronize"] - few["synchronize"] == 5
