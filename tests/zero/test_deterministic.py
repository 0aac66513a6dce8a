"""Promise: with `deterministic` any number of ranks gives the same bits, at every stage."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

import shardproof
from distributed.harness import adamw, rows
from distributed.pool import RemoteError
from shardproof.errors import EngineError
from zero.models import Net
from zero.test_dynamic import Omni

TERMS = 12  # micro-batches of two rows in a step: 1, 2, 3 and 4 ranks divide it


class Twice(Net):
    """Each block is used twice, so at stage 3 gathered twice; the second time under reentrant checkpointing."""

    def run_block(self, block: torch.nn.Module, h: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, block(h), use_reentrant=True)


def trained(
    stage: int, options: dict[str, Any], clip: bool = True, deterministic: bool = True
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Norms and weights after three steps, each of `TERMS` backward passes on all ranks together."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = shardproof.shard(Twice(), stage, deterministic=deterministic, gradient_divide_factor=1, **options)
    optimizer = adamw(model.parameters())
    norms = []
    for k in range(3):
        batch = {name: value.view(TERMS, 2, -1) for name, value in rows(k, 2 * TERMS).items()}
        for j in range(TERMS // world):
            number = j * world + rank
            with shardproof.no_sync(model):
                loss = mse_loss(model(batch["x"][number]).float(), batch["y"][number], reduction="sum")
                (loss / (6 * TERMS)).backward()
        if clip:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, shardproof.full_state_dict(model, rank0_only=False)


PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"mixed_precision": torch.bfloat16}}


@functools.cache
def alone(precision: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    return trained(0, PRECISIONS[precision])


def cases() -> Iterator[Any]:
    """By default each number of ranks, stage and precision once."""
    default = {(2, 0, "fp32"), (2, 3, "bf16"), (4, 1, "bf16"), (4, 2, "fp32"), (4, 3, "fp32")}
    for case in itertools.product([2, 3, 4], [0, 1, 2, 3], PRECISIONS):
        yield pytest.param(*case, marks=[] if case in default else pytest.mark.slow)


@pytest.mark.parametrize(("world", "stage", "precision"), cases())
def test_any_number_of_ranks_gives_the_same_bits(run, world, stage, precision):
    options = PRECISIONS[precision]
    norms, weights = alone(precision)
    for got_norms, got in run(world, trained, stage, options):
        assert got_norms == norms
        assert all(torch.equal(got[name], value) for name, value in weights.items())


def test_without_it_they_do_not(run4):
    """Or these tests would not see anything."""
    _, weights = trained(0, {}, deterministic=False)
    _, got = run4(trained, 3, {}, deterministic=False)[0]
    assert not all(torch.equal(got[name], value) for name, value in weights.items())
    assert all(torch.allclose(got[name], value, atol=1e-5) for name, value in weights.items())


def test_on_files_too(run2, tmp_path):
    _, weights = trained(0, {}, clip=False)
    for _, got in run2(trained, 3, {"offload": f"nvme:{tmp_path}"}, clip=False):
        assert all(torch.equal(got[name], value) for name, value in weights.items())


# Terms of each step, and whether all of them go the same way: such steps become a plan, which is left then.
STEPS = [*[(12, True)] * 5, (11, False), (3, False), (12, True), (9, True), (12, False)]


def loss_of(model: torch.nn.Module, step: int, number: int, alike: bool) -> torch.Tensor:
    """Of a micro-batch that has a picture, or not; an expert, or none."""
    draw = torch.Generator().manual_seed(100 * step + number)
    tokens, targets = torch.randint(0, 16, (2, 2, 5), generator=draw)
    image = torch.randn(2, 5, 8, generator=draw)
    seen, expert = (True, 0) if alike else (number in (1, 3, 4, 8), [0, None, 2, 1, 0, 3, 2][number % 7])
    logits = model(tokens, image.requires_grad_() if seen else None, expert, 1 + (not alike and number % 2), [1, 0, 2])
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 120


def learnt(stage: int, trains: str = "") -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Norms and weights after steps whose micro-batches go different ways, and how often a rank did what only a plan
    has asked for."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = Omni()
    for name, p in model.named_parameters():
        p.requires_grad_(trains in name)
    if trains:  # as checkpointing has it: backward goes through text, too, and leaves no gradient
        model.embed.register_forward_hook(lambda module, args, out: out.requires_grad_())
    shardproof.shard(model, stage, deterministic=True, gradient_divide_factor=1)
    optimizer, norms, lent = adamw(model.parameters()), [], shardproof.stats(model).lent
    for step, (terms, alike) in enumerate(STEPS):
        for number in range(rank, terms, world):
            loss_of(model, step, number, alike).backward()
            if not alike and number % 4 == 0:  # one rank evaluates in between
                with torch.no_grad():
                    loss_of(model, step, number, alike)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, shardproof.full_state_dict(model, rank0_only=False), shardproof.stats(model).lent - lent


@functools.cache
def learnt_alone(trains: str = "") -> tuple[list[float], dict[str, torch.Tensor], int]:
    return learnt(0, trains)


def other_paths() -> Iterator[Any]:
    default = {(2, 3), (3, 0), (4, 3)}
    for case in itertools.product([2, 3, 4], [0, 1, 2, 3]):
        yield pytest.param(*case, marks=[] if case in default else pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "stage"), other_paths())
def test_so_do_ranks_on_different_paths(run, world, stage):
    """Each takes what one process adds in the order of micro-batches, also where a plan is left."""
    norms, weights, _ = learnt_alone()
    lent = 0
    for got_norms, got, paid in run(world, learnt, stage):
        assert got_norms == norms
        assert [name for name, value in weights.items() if not torch.equal(got[name], value)] == []
        lent += paid
    assert lent > 0 or stage == 0


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [0, 3])
def test_a_pass_without_gradients_is_one_too(run2, stage):
    norms, weights, _ = learnt_alone("visual")
    for got_norms, got, _ in run2(learnt, stage, "visual"):
        assert got_norms == norms
        assert [name for name, value in weights.items() if not torch.equal(got[name], value)] == []


def declared(alike: bool) -> list[int]:
    """Two passes of ranks that were said to do the same; how often some units were reduced."""
    torch.manual_seed(0)
    model = shardproof.shard(Omni(), 0, deterministic=True, dynamic="never")
    for number in (dist.get_rank(), 2 + dist.get_rank()):
        loss_of(model, 0, number, alike).backward()
    units = shardproof.stats(model).units
    return [units[name].reductions for name in ("layers.0", "visual.0", "experts.1")]


def test_ranks_that_were_said_to_do_the_same_are_held_to_it(run2):
    assert run2(declared, True) == [[2, 2, 0], [2, 2, 0]]
    with pytest.raises(RemoteError, match="Not every rank has gradients of 'visual"):  # which ends the group of ranks
        run2(declared, False)


def sum_of_ranks() -> None:
    """`gradient_divide_factor=1` adds up what the mean would divide."""
    grads = []
    for options in ({}, {"gradient_divide_factor": 1}):
        torch.manual_seed(0)
        model = shardproof.shard(Net(), 2, **options)
        model(torch.ones(1, 6)).sum().backward()
        grads.append(model.head.weight.grad.norm())
    assert float(grads[1] / grads[0]) == pytest.approx(dist.get_world_size())


def test_a_factor_of_ones_own(run2):
    run2(sum_of_ranks)


def test_a_factor_that_divides_nothing_is_refused():
    with pytest.raises(EngineError, match="gradient_divide_factor=0 must be a number above 0"):
        shardproof.shard(Net(), 0, gradient_divide_factor=0)
