"""Promise: a collective that a user calls on a parameter or its gradient does what it does in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardproof
from shardproof.errors import DesyncError, EngineError
from zero.models import FEATURES, Net

Each = Callable[[torch.Tensor], Any]
Values = list[torch.Tensor]


def averaged(t: torch.Tensor) -> None:
    """As torch's tutorial on writing distributed programs averages gradients."""
    dist.all_reduce(t, op=dist.ReduceOp.SUM)
    t /= dist.get_world_size()


def averaged_beside(t: torch.Tensor) -> None:
    work = dist.all_reduce(t, async_op=True)
    work.wait()
    t.div_(dist.get_world_size())


def averaged_together(t: torch.Tensor) -> None:
    dist.all_reduce_coalesced([t])
    t.div_(dist.get_world_size())


def averaged_of_all(t: torch.Tensor) -> None:
    found = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(found, t)
    t.copy_(torch.stack(found).mean(0))


def summed(t: torch.Tensor) -> None:
    dist.all_reduce(t)


def of_rank_one(t: torch.Tensor) -> None:
    dist.broadcast(t, 1)


def dealt_out(t: torch.Tensor) -> None:
    ones = [torch.full_like(t, 0.1) for _ in range(dist.get_world_size())]
    dist.scatter(t, ones if dist.get_rank() == 0 else None, 0)


OF_VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gradient": lambda p: p.grad,
    "gradient.data": lambda p: p.grad.data,
    "parameter": lambda p: p,
    "data": lambda p: p.data,
}


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, each: Each, steps: int) -> Values:
    """So many steps, before which each parameter goes through `each`. The values that come out."""
    for _ in range(steps):
        out = model(x)
        F.mse_loss(out, torch.ones_like(out)).backward()
        with torch.no_grad():
            for p in model.parameters():
                each(p)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def apart(one: Values, other: Values) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def trained(stage: int | None, what: str, each: Each) -> Values:
    """Two steps in which all ranks have the same rows, so that plain copies stay alike."""
    torch.manual_seed(0)
    model = Net()
    if stage is not None:
        shardproof.shard(model, stage)
    x = torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return stepped(model, optimizer, x, lambda p: each(OF_VALUES[what](p)), 2)


def same(stage: int, what: str, each: Each) -> float:
    return apart(trained(None, what, each), trained(stage, what, each))


@pytest.mark.sampled
@pytest.mark.parametrize("each", [averaged, averaged_beside, averaged_together, averaged_of_all, summed])
@pytest.mark.parametrize("what", OF_VALUES)
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_by_hand_as_in_plain_torch(run2, stage, what, each):
    assert max(run2(same, stage, what, each)) < 1e-6


@pytest.mark.sampled
@pytest.mark.parametrize("each", [of_rank_one, dealt_out])
@pytest.mark.parametrize("what", ["gradient", "data"])
@pytest.mark.parametrize("stage", [0, 3])
def test_what_one_rank_has_goes_to_all(run2, stage, what, each):
    assert max(run2(same, stage, what, each)) < 1e-6


def reduced_to_one(stage: int) -> str:
    model = shardproof.shard(nn.Linear(4, 4), stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            dist.reduce(model.weight.grad, 0)
            optimizer.step()
    except DesyncError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_that_one_rank_alone_has_summed_is_refused(run2, stage):
    for told in run2(reduced_to_one, stage):
        assert "weight" in told


def received(stage: int) -> str:
    model = shardproof.shard(nn.Linear(4, 4), stage)
    shardproof.barrier(model)
    if dist.get_rank() == 1:
        with pytest.raises(EngineError, match=r"recv would give 'weight' another value on this rank alone"):
            dist.recv(model.weight.data, 0)
    return "through"


def test_a_value_for_one_rank_is_refused(run2):
    assert run2(received, 0) == ["through"] * 2


def own_reducer(model: nn.Module, kind: str) -> None:
    """Data parallelism as people write it by hand: each gradient is averaged when it is there."""

    def beside(grad: torch.Tensor) -> torch.Tensor:
        mean = grad.clone()
        dist.all_reduce(mean, async_op=True).wait()
        return mean / dist.get_world_size()

    def grown(p: torch.Tensor) -> None:
        averaged(p.grad)

    for p in model.parameters():
        if kind == "gradient":
            p.register_hook(beside)
        else:
            p.register_post_accumulate_grad_hook(grown)


def reduced_by_hand(stage: int | None, kind: str, before: bool) -> Values:
    """Three steps: on the rows of all ranks in one process (None), or on this rank's."""
    torch.manual_seed(0)
    model = Net()
    if stage is not None and before:
        own_reducer(model, kind)
    if stage is not None:
        shardproof.shard(model, stage)
    if stage is not None and not before:
        own_reducer(model, kind)
    x = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(1))
    mine = x if stage is None else x[dist.get_rank() :: dist.get_world_size()]
    return stepped(model, torch.optim.SGD(model.parameters(), lr=0.1), mine, lambda p: None, 3)


def differs(stage: int, kind: str, before: bool) -> float:
    return apart(reduced_by_hand(None, kind, before), reduced_by_hand(stage, kind, before))


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["gradient", "grown"])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_hooks_that_average_by_hand_change_nothing(run2, stage, before, kind):
    assert max(run2(differs, stage, kind, before)) < 1e-6
