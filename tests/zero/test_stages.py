"""Promise: a stage says where things live and when they move, never what the numbers are; and what `stats` tells."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as nn_module

import shardproof
from distributed.harness import Averaged, Case, Record, Sharded, compare, listening, train
from shardproof.zero.schedule import room
from zero.graphs import CASES, CheckpointInside
from zero.models import FEATURES, Net

STAGES = [0, 1, 2, 3]

# --- the same bits --------------------------------------------------------------------------------

# Every parameter is used once and the gradients of two ranks are added, so there is one order of additions.
SAME_BITS = [
    "plain_without_clipping",
    "frozen_mixture",
    "checkpoint_inside_the_block_nonreentrant",
    "optimizer_adamw_fused",
]


def same_bits(name: str, stage: int) -> None:
    case = Case(**{**CASES[name].__dict__, "clip": None, "skip_grads": True})
    compare(train(case, Sharded(stage)), train(case, Averaged()), tolerance=0)


@pytest.mark.sampled
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", SAME_BITS)
def test_two_ranks_are_bit_equal_to_averaged_gradients(run2, name, stage):
    run2(same_bits, name, stage)


def record(name: str, stage: int) -> Record:
    return train(CASES[name], Sharded(stage))


@pytest.mark.parametrize("name", ["plain", "tied_embedding_and_head", "unused_parameters_and_weight_decay"])
def test_stages_1_to_3_are_bit_equal_to_each_other_clipping_too(run2, name):
    first, *others = (run2(record, name, stage)[0] for stage in (1, 2, 3))
    for other in others:
        compare(other, first, tolerance=0)


def reduced_in(dtype: torch.dtype, stage: int) -> tuple[list[torch.Tensor], int]:
    """Gradients, whole, and the bytes that were reduced for them."""
    torch.manual_seed(0)
    model = shardproof.shard(Net(), stage, mixed_precision=shardproof.MixedPrecision(torch.float32, reduce=dtype))
    batch = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(batch).square().mean().backward()
    return [p.grad + 0 for p in model.parameters()], shardproof.stats(model).total.bytes_reduced


def in_half_precision(stage: int) -> None:
    (exact, whole), (rounded, half) = reduced_in(torch.float32, stage), reduced_in(torch.bfloat16, stage)
    assert half == whole // 2
    assert {g.dtype for g in rounded} == {torch.float32}  # as the masters
    assert not all(torch.equal(*pair) for pair in zip(rounded, exact, strict=True))
    for got, wanted in zip(rounded, exact, strict=True):
        assert (got - wanted).abs().max() <= 2**-7 * wanted.abs().max()


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_may_be_added_in_bf16(run2, stage):
    run2(in_half_precision, stage)


# --- what moves -----------------------------------------------------------------------------------


class Big(Net):
    """Blocks of 4 * 48 * 48 elements, so that gathered units stand out in memory."""

    def __init__(self, depth: int, checkpointed: bool = False) -> None:
        super().__init__(depth=0)
        self.embed = nn.Linear(FEATURES, 48)
        self.norm = nn.LayerNorm(48)
        self.head = nn.Linear(48, 3)
        self.checkpointed = checkpointed
        for _ in range(depth):
            self.blocks.append(nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 48)))

    def run_block(self, block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        if self.checkpointed and torch.is_grad_enabled():
            return h + torch.utils.checkpoint.checkpoint(block, h, use_reentrant=False)
        return h + block(h)


BLOCK_BYTES = 4 * (2 * 48 * 96 + 48 + 96)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, FEATURES)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def told(stage: int) -> list[dict]:
    """`stats` after `shard`, and after each of three steps."""
    model = shardproof.shard(Big(4), stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = [shardproof.stats(model)]
    for _ in range(3):
        one_step(model, optimizer)
        seen.append(shardproof.stats(model))
    plain = [{"total": vars(s.total), **{name: vars(unit) for name, unit in s.units.items()}} for s in seen]
    assert list(plain[0]) == ["total", "root", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    return plain


@pytest.mark.parametrize("stage", STAGES)
def test_stats_tell_what_is_held_and_moved(run2, stage):
    for seen in run2(told, stage):
        start, _first, second, third = seen
        for now in seen:
            for field, value in now["total"].items():
                if field != "gathered_peak_bytes":
                    assert value == sum(unit[field] for name, unit in now.items() if name != "total")
            held = now["blocks.1"]["shard_bytes"]
            assert BLOCK_BYTES / (2 if stage else 1) <= held <= 1.05 * BLOCK_BYTES / (2 if stage else 1)
        assert start["total"]["gathers"] == start["total"]["reductions"] == 0
        block = {field: third["blocks.1"][field] - second["blocks.1"][field] for field in third["blocks.1"]}
        gathered, reduced = block["bytes_gathered"], block["bytes_reduced"]
        assert block["gathers"] == {0: 0, 1: 1, 2: 1, 3: 2}[stage]
        assert block["reductions"] == 1
        whole = third["blocks.1"]["shard_bytes"] * (2 if stage else 1)
        assert gathered == block["gathers"] * whole
        assert reduced == whole * (1 if stage else 2)
        assert (third["total"]["prefetch_hits"] > second["total"]["prefetch_hits"]) == (stage > 0)
        if stage == 3:
            assert third["total"]["gathered_bytes"] == 0
            root = third["root"]["gathered_peak_bytes"]
            assert third["total"]["gathered_peak_bytes"] <= root + 2 * third["blocks.1"]["gathered_peak_bytes"]
            # three of four units are prefetched, forward and backward; the first of each has nothing before it
            assert third["total"]["prefetch_hits"] - second["total"]["prefetch_hits"] >= 5


def test_stats_on_one_rank_move_nothing():
    for now in told(3):
        assert now["total"]["bytes_gathered"] == now["total"]["bytes_reduced"] == 0
        assert now["total"]["shard_bytes"] >= 4 * BLOCK_BYTES


class LargeHead(Big):
    """The head alone is worth a reduction of its own."""

    def __init__(self) -> None:
        super().__init__(4)
        self.head = nn.Linear(48, 1 << 15)


def early_head(stage: int) -> None:
    model = shardproof.shard(LargeHead(), stage)
    reference = LargeHead()
    reference.load_state_dict(shardproof.full_state_dict(model, rank0_only=False))
    batch = torch.ones(2, FEATURES)
    under_way = []
    for k in range(3):
        before = shardproof.stats(model).units["root"]
        model.zero_grad()
        hooked = model.embed.register_full_backward_hook(
            lambda *_: under_way.append(shardproof.stats(model).units["root"])
        )
        model(batch).square().mean().backward()
        hooked.remove()
        if k == 0:
            reference(batch).square().mean().backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.whole(), q.grad)
        with torch.no_grad():
            model.head.bias.add_(0.0)  # as a step does: what is gathered is stale
    after = shardproof.stats(model).units["root"]
    assert under_way[-1].reductions - before.reductions == (0 if stage == 1 else 1)
    assert after.reductions - before.reductions == 2  # the head, and the rest
    assert after.gathers - before.gathers <= 2


@pytest.mark.parametrize("stage", STAGES)
def test_the_gradient_of_a_large_head_is_under_way_while_the_blocks_work(run2, stage):
    run2(early_head, stage)


def traffic(stage: int, kind: str) -> tuple[int, int]:
    """Gathers and reductions of one block in the last of three steps of four micro-batches."""
    model = shardproof.shard(Big(4), stage)
    if kind == "frozen":
        model.blocks.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        before = shardproof.stats(model).units["blocks.1"]
        for i in range(4):
            if kind == "no_sync" and i < 3:
                with shardproof.no_sync(model):
                    model(torch.ones(2, FEATURES)).square().mean().backward()
            else:
                model(torch.ones(2, FEATURES)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = shardproof.stats(model).units["blocks.1"]
    return after.gathers - before.gathers, after.reductions - before.reductions


@pytest.mark.parametrize(
    "stage, kind, gathers, reductions",
    [
        (0, "no_sync", 0, 1),
        (1, "no_sync", 1, 1),
        (2, "no_sync", 1, 1),
        (2, "plain", 1, 4),
        (3, "plain", 8, 4),
        (3, "no_sync", 8, 1),
        (2, "frozen", 0, 0),
        (3, "frozen", 4, 0),  # one of the last two of backward is still there when forward comes
    ],
)
def test_accumulation_moves_what_it_must(run2, stage, kind, gathers, reductions):
    assert run2(traffic, stage, kind) == [(gathers, reductions)] * 2


# --- what is held ---------------------------------------------------------------------------------


def big_storages() -> int:
    """How many buffers as large as a gathered block are alive, by asking the garbage collector, not the engine."""
    found = set()
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.device.type == "cpu" and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            if BLOCK_BYTES <= storage.nbytes() <= 1.1 * BLOCK_BYTES:
                found.add(storage.data_ptr())
    return len(found)


def most_alive(depth: int, checkpointed: bool) -> int:
    """The most big buffers alive inside two of the blocks, forward or backward, evaluation or training."""
    model = shardproof.shard(Big(depth, checkpointed), 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    one_step(model, optimizer)
    one_step(model, optimizer)
    seen = []

    def look(*_: object) -> None:
        seen.append(big_storages())

    for block in (model.blocks[1], model.blocks[depth - 2]):
        block[1].register_forward_hook(look)
        block[1].register_full_backward_hook(look)
    with torch.no_grad():
        model(torch.ones(2, FEATURES))
    one_step(model, optimizer)
    look()
    stats = shardproof.stats(model)
    root, block = stats.units["root"].gathered_peak_bytes, stats.units["blocks.0"].gathered_peak_bytes
    assert stats.total.gathered_peak_bytes <= root + 2 * block
    return max(seen)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_stage_3_holds_a_fixed_number_of_whole_units_however_deep_the_model(run2, checkpointed):
    shallow, deep = run2(most_alive, 5, checkpointed), run2(most_alive, 10, checkpointed)
    assert shallow == deep
    # two gathered, one whole gradient being made, two being reduced, and one kept for the next use
    assert max(deep) <= 6


class Words(nn.Module):
    """An embedding and a head that are large enough for buffers of their own."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(1 << 17, 8), nn.Linear(8, 1 << 17, bias=False)
        self.norm, self.checkpointed = nn.LayerNorm(8), checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.embed(tokens))
        return (
            torch.utils.checkpoint.checkpoint(self.head, h, use_reentrant=False) if self.checkpointed else self.head(h)
        )


def held_when_backward_begins(checkpointed: bool) -> tuple[list[set[str]], list[int]]:
    """Of the root's large parameters, in each of three steps; and gathers in each."""
    model = shardproof.shard(Words(checkpointed), 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held, gathers = [], []

    def look(_: torch.Tensor) -> None:
        flats = model.__dict__["_shardproof"].root.flats
        held.append({f.names[0] for f in flats if f.whole is not None and len(f.names) == 1})

    for _ in range(3):
        before = shardproof.stats(model).total.gathers
        logits = model(torch.arange(4) + dist.get_rank())
        logits.register_hook(look)
        logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        gathers.append(shardproof.stats(model).total.gathers - before)
    return held, gathers


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed head"])
def test_of_the_root_only_what_backward_asks_for_is_held_until_then(run2, checkpointed):
    for held, gathers in run2(held_when_backward_begins, checkpointed):
        kept = {"head.weight"}
        assert held == ([set(), kept, kept] if checkpointed else [kept] * 3)
        assert gathers == ([4, 3, 3] if checkpointed else [3] * 3)  # the first time nobody knows of the head


def generation_holds(depth: int, memory: int | None) -> tuple[int, list[int], list[str]]:
    """Peak of gathered bytes in units, gathers in each of five passes, and what was said; then a step of training."""
    model = shardproof.shard(Big(depth), 3, inference_memory=memory)
    gathers = []
    with listening() as lines, torch.inference_mode():
        for _ in range(5):
            before = shardproof.stats(model).total.gathers
            model(torch.ones(1, FEATURES))
            gathers.append(shardproof.stats(model).total.gathers - before)
    stats = shardproof.stats(model)
    peak = stats.total.gathered_peak_bytes // stats.units["blocks.0"].gathered_peak_bytes
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    held = []
    model.blocks[depth // 2].register_forward_hook(
        lambda *_: held.append(sum(u.gathered_bytes > 0 for u in shardproof.stats(model).units.values()))
    )
    one_step(model, optimizer)
    assert max(held) <= 1 + 2
    return peak, gathers, lines


def test_inference_keeps_parameters_gathered_where_they_fit(run2):
    (peak, gathers, lines), (_, _, silent) = run2(generation_holds, 8, None)
    assert peak == 8
    assert gathers == [9, 9, 0, 0, 0]
    assert len(lines) == 1
    assert "stay gathered" in lines[0]
    assert silent == []


def test_inference_holds_two_units_beyond_the_root_where_they_do_not(run2):
    (peak, gathers, lines), _ = run2(generation_holds, 8, 0)
    assert peak == 2
    assert gathers == [9] * 5
    assert len(lines) == 1
    assert "inference_memory" in lines[0]


def rooms_of_two_generations(free: int) -> tuple[list[int], list[str]]:
    """How many units may stay in each, and in the training after it, and what was said."""
    model = shardproof.shard(Big(8), 3)
    whole = sum(flat.numel * flat.dtype.itemsize for flat in model._shardproof.flats)
    rooms = []
    with listening() as lines, mock.patch.object(room, "free_memory", return_value=free * whole):
        for _ in range(2):
            with torch.no_grad():
                model(torch.ones(1, FEATURES))
                model(torch.ones(1, FEATURES))
            rooms.append(model._shardproof.room)
            one_step(model, torch.optim.SGD(model.parameters(), lr=1e-2))
            rooms.append(model._shardproof.room)
    return rooms, lines


@pytest.mark.parametrize("free", [1, 2])
def test_half_of_what_is_free_may_be_kept_and_one_line_says_so(run2, free: int):
    (rooms, lines), (others, silent) = run2(rooms_of_two_generations, free)
    assert rooms == others == [9 if free == 2 else 2, 2] * 2
    assert len(lines) == 1
    assert silent == []


def one_model_after_another() -> int:
    gc.disable()
    try:
        for _ in range(3):
            model = shardproof.shard(Net(), 3)
            model(torch.ones(2, FEATURES)).square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            del model
            if dist.get_rank() == 0:
                gc.collect()
    finally:
        gc.enable()
    return 3


def test_models_may_be_collected_at_different_times_on_different_ranks(run2):
    assert run2(one_model_after_another, timeout=20) == [3, 3]


def collected_while_another_is_made() -> int:
    """As garbage is: at any time, here while torch goes through the hooks that a parameter is registered with."""
    held: list[nn.Module] = []

    def collect(*_: Any) -> None:
        held.clear()
        gc.collect()

    handle = nn_module.register_module_parameter_registration_hook(collect)
    try:
        held.append(shardproof.shard(Net(), 0))
        nn.Linear(2, 2)
        counts = []
        for _ in range(3):
            model = shardproof.shard(Net(), 0)
            counts.append(len(nn_module._global_parameter_registration_hooks))
            del model
            gc.collect()
    finally:
        handle.remove()
    return counts[-1] - counts[0]


def test_a_model_may_be_collected_while_another_is_made(run2):
    assert run2(collected_while_another_is_made, timeout=20) == [0, 0]


def bytes_after_models(stage: int) -> list[int]:
    """Bytes of all memory that Python knows of after one model, and after another, have come and gone."""
    found = []
    for _ in range(2):
        model = shardproof.shard(Big(3, False), stage)
        one_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        here = weakref.ref(model)
        del model
        gc.collect()  # its engine and its units hold each other
        assert here() is None
        kept = [
            thing for thing in gc.get_objects() if type(thing) is torch.UntypedStorage and thing.device.type == "cpu"
        ]
        found.append(sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values()))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_that_is_gone_leaves_no_memory(run2, stage):
    for first, second in run2(bytes_after_models, stage):
        assert second <= first


# --- units ----------------------------------------------------------------------------------------


def names(units: object) -> list[str]:
    model = shardproof.shard(Net(), 3, units=units)
    model(torch.ones(2, FEATURES)).square().mean().backward()
    return list(shardproof.stats(model).units)


@pytest.mark.parametrize(
    "units, expected",
    [
        (None, ["root", "blocks.0", "blocks.1", "blocks.2"]),
        ([], ["root"]),
        (["blocks.1", "head"], ["root", "blocks.1", "head"]),
        (["blocks.*.up"], ["root", "blocks.0.up", "blocks.1.up", "blocks.2.up"]),
        ([nn.LayerNorm], ["root", "blocks.0.norm", "blocks.1.norm", "blocks.2.norm", "norm"]),
        (["Block"], ["root", "blocks.0", "blocks.1", "blocks.2"]),
    ],
)
def test_units_are_blocks_classes_or_patterns(run2, units, expected):
    assert run2(names, units) == [expected] * 2


def other_units(units: list[str], stage: int) -> None:
    for name in ("plain", "checkpoint_of_a_block_used_twice_nonreentrant", "weights_tied_across_units"):
        plain = CASES[name]
        compare(
            train(Case(**{**plain.__dict__, "options": {"units": units}}), Sharded(stage)),
            train(plain, Sharded(0)),
            tolerance=1e-6,
        )


@pytest.mark.sampled
@pytest.mark.parametrize("units", [[], ["blocks.*", "blocks.*.up"]])
def test_numbers_do_not_depend_on_the_choice_of_units(run2, units):
    run2(other_units, units, 3)


# --- mixed precision ------------------------------------------------------------------------------


def bf16_reference(world: int, steps: int, build: object) -> list[dict[str, torch.Tensor]]:
    """By hand, in one process: fp32 masters, weights and inputs cast to bf16, gradients averaged in fp32."""
    torch.manual_seed(7)
    model = build()
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2, eps=1e-4)
    model.bfloat16()
    states = []
    for k in range(steps):
        batch = CASES["plain"].rows(k, 8)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
        for rank in range(world):
            part = slice(rank * 8 // world, (rank + 1) * 8 // world)
            model.zero_grad()
            loss = nn.functional.mse_loss(model(batch["x"][part].bfloat16()).float(), batch["y"][part])
            loss.backward()
            for name, p in model.named_parameters():
                grad = p.grad.float() / world
                masters[name].grad = grad if rank == 0 else masters[name].grad + grad
        torch.nn.utils.clip_grad_norm_(masters.values(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        states.append({name: p.detach().clone() for name, p in masters.items()})
    return states


def bf16(stage: int, checkpointed: bool) -> None:
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    build = functools.partial(Net, CheckpointInside) if checkpointed else Net
    torch.manual_seed(7)
    model = shardproof.shard(build(), stage, mixed_precision=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for k, expected in enumerate(bf16_reference(world, 3, build)):
        batch = CASES["plain"].rows(k, 8)
        part = slice(rank * 8 // world, (rank + 1) * 8 // world)
        out = model(batch["x"][part])
        assert out.dtype is torch.bfloat16
        nn.functional.mse_loss(out.float(), batch["y"][part]).backward()
        assert all(p.grad.dtype is torch.float32 for p in model.parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        for name, value in shardproof.full_state_dict(model, rank0_only=False).items():
            assert value.dtype is torch.float32
            torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-6, msg=f"{name} after step {k}")
    assert all(state["exp_avg"].dtype is torch.float32 for state in optimizer.state.values())


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_mixed_precision_equals_the_hand_written_reference(run2, stage, checkpointed):
    run2(bf16, stage, checkpointed)


@pytest.mark.parametrize("stage", STAGES)
def test_mixed_precision_on_one_rank(stage):
    bf16(stage, False)


class Divided(nn.Module):
    """A loss divided by the tokens of the step, as those of transformers' models."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        assert x.dtype is self.linear.weight.dtype
        return self.linear(x).float().sum() / count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_number_among_the_inputs_is_not_rounded(dtype):
    model = shardproof.shard(Divided(), 0, mixed_precision=dtype)
    total, mean = (model(torch.ones(1, 2), torch.tensor(count)) for count in (1.0, 70001.0))
    assert float(mean.detach()) == pytest.approx(float(total.detach()) / 70001, rel=1e-6)


def small_updates_survive(stage: int) -> float:
    """A step too small for bf16 still moves the fp32 master: a thousand of them add up."""
    model = shardproof.shard(nn.Linear(2, 2, bias=False), stage, mixed_precision=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    for _ in range(20):
        model(torch.ones(1, 2)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return shardproof.full_state_dict(model, rank0_only=False)["weight"][0, 0].item()


@pytest.mark.parametrize("stage", STAGES)
def test_steps_smaller_than_bf16_resolves_are_not_lost(run2, stage):
    assert run2(small_updates_survive, stage) == [pytest.approx(1 - 20e-5, abs=1e-6)] * 2


# --- this rank's part of what is gathered -----------------------------------------------------------


def memory_of_weights(stage: int, precision: torch.dtype | None) -> tuple[list[int], list[bool], int]:
    """After each of three steps and in `whole`, bytes of the storages of shards and gathered values; whether shards
    stayed where they were; the bytes of all parameters in fp32, padding included."""
    model = shardproof.shard(Big(4), stage, mixed_precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    weight, place, held, stayed = model.blocks[1][0].weight, [], [], []

    def look() -> None:
        flats = model.__dict__["_shardproof"].flats
        tensors = [t for f in flats for t in (f.shard, f.whole) if t is not None]
        held.append(sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()))
        place.append(weight.detach().local.data_ptr())
        stayed.append(place[0] == place[-1])

    for _ in range(3):
        one_step(model, optimizer)
        with torch.no_grad():
            model(torch.ones(2, FEATURES))
        look()
    with shardproof.whole(model):
        look()
    return held, stayed[:3], shardproof.stats(model).total.shard_bytes * dist.get_world_size()


@pytest.mark.parametrize("stage", [1, 2])
def test_values_of_one_dtype_are_there_once(run2, stage):
    for held, stayed, whole in run2(memory_of_weights, stage, None):
        assert held == [whole, whole, whole, whole + whole // 2]  # edits inside of `whole` are told by comparing
        assert all(stayed)
    for held, _, whole in run2(memory_of_weights, stage, torch.bfloat16):
        assert held == [whole // 2 + whole // 2] * 4  # masters of a half, and all in bf16


def kept_view(stage: int, change: str, folder: str) -> None:
    """A gradient through weights of before a change, which has changed this rank's part of them."""
    torch.manual_seed(0)
    model = shardproof.shard(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)), stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(FEATURES, requires_grad=True)
    for number in range(2):
        with torch.no_grad():
            model[0].weight.mul_(2)
        shardproof.save(model, None, f"{folder}/{number}", asynchronous=False)
    for number in range(2):
        model(torch.ones(2, FEATURES)).square().mean().backward()
        weight = model[0].weight.detach() + 0
        held = torch.reshape(model[0].weight, (FEATURES, FEATURES))
        product = (held @ x).sum()
        if change == "step":
            optimizer.step()
        elif change == "edit":
            with torch.no_grad():
                model[0].weight.mul_(2)
        elif change == "checkpoint":
            shardproof.load(model, None, f"{folder}/{number}")
        else:
            shardproof.load_full_state_dict(model, {k: v * 2 for k, v in shardproof.full_state_dict(model).items()})
        assert not torch.equal(model[0].weight.detach() + 0, weight)
        model(torch.ones(2, FEATURES))
        if stage < 3:  # the values are there, and torch refuses them, as on one process
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(product, x)
            torch.testing.assert_close(held, weight)
            continue
        (grad,) = torch.autograd.grad(product, x)
        torch.testing.assert_close(grad, weight.sum(0))


@pytest.mark.parametrize("change", ["step", "edit", "load", "checkpoint"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_who_holds_a_view_keeps_the_values_of_then(run2, tmp_path, stage, change):
    run2(kept_view, stage, change, str(tmp_path))


def finished_in_inference_mode(stage: int) -> list[float]:
    """Gradients that are first looked at where an evaluation looks at them, and reduced in another dtype."""
    torch.manual_seed(0)
    precision = shardproof.MixedPrecision(torch.float32, reduce=torch.bfloat16)
    model = shardproof.shard(Net(), stage, mixed_precision=precision)
    model(torch.ones(2, FEATURES)).sum().backward()
    with torch.inference_mode():
        before = model.head.bias.grad.norm()
    norm = shardproof.clip_grad_norm_(model, 1e-3)
    model(torch.ones(2, FEATURES)).sum().backward()
    return [float(before), float(norm), float(model.head.bias.grad.norm())]


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_that_an_evaluation_looks_at_are_clipped_and_grow(run2, stage):
    for before, _, after in run2(finished_in_inference_mode, stage):
        assert abs(after - before) < 1e-2 * before
