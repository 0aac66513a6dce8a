"""Promise: `torch.compile` of a unit gives what one process gives, compiled before or after `shard`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import shardproof
from distributed.harness import Case, Env, Sharded, parity
from zero.graphs import CheckpointInside, mse
from zero.models import Net


def in_place(backend: str, **net: Any) -> nn.Module:
    model = Net(**net)
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def wrapped(backend: str) -> nn.Module:
    model = Net()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend)
    return model


def compile_blocks(backend: str, env: Env, model: Net) -> None:
    for block in model.blocks:
        block.compile(backend=backend)


def train_and_evaluate(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    loss = mse(model, batch)
    loss.backward()
    with torch.no_grad():
        return [loss, mse(model, batch)]


def cases(backend: str) -> dict[str, Case]:
    return {
        f"{backend}_before_shard": Case(functools.partial(in_place, backend), train_and_evaluate, bits=False),
        f"{backend}_wrapped_before_shard": Case(functools.partial(wrapped, backend), bits=False),
        f"{backend}_after_shard": Case(Net, sharded=functools.partial(compile_blocks, backend), bits=False),
        f"{backend}_checkpointed_inside": Case(
            functools.partial(in_place, backend, block=CheckpointInside), bits=False
        ),
    }


CASES = {**cases("eager"), **cases("aot_eager"), **cases("inductor")}
QUICK = [name for name in CASES if name.startswith("aot_eager")]


def check(name: str, stage: int) -> None:
    torch._dynamo.reset()
    parity(name, CASES[name], Sharded(stage))


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_equal_one_process(run2, name, stage):
    run2(check, name, stage, timeout=180)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process_with_every_backend(run2, name, stage):
    run2(check, name, stage, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_rank_equals_plain_torch(name):
    check(name, 3)


def recompilations(stage: int) -> int:
    """How many graphs three steps compile."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = Net()
    for block in model.blocks:
        block.compile(backend=backend)
    engine = Sharded(stage)
    engine.shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return len(graphs)


def test_blocks_are_compiled_as_often_as_without_sharding(run2):
    torch._dynamo.reset()
    counts = run2(recompilations, 3, timeout=180)
    assert max(counts) <= 3  # one graph for each of three blocks, or one for all


def test_what_compiling_the_whole_model_returns_is_the_model(tmp_path):
    model = shardproof.shard(Net(), 3)
    compiled = torch.compile(model, backend="eager")
    shardproof.save(compiled, None, tmp_path / "state").wait()
    wanted = model.state_dict()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    shardproof.load(compiled, None, tmp_path / "state")
    found = shardproof.full_state_dict(compiled)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    with shardproof.no_sync(compiled), shardproof.whole(compiled):
        shardproof.barrier(compiled)
