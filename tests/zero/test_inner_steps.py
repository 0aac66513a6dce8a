"""Meta-learning: steps inside of a loss go by the gradient of a rank's own task, as the page of limits says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import shardproof

TASKS, ROWS = 4, 10


def task(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    height, phase = torch.rand(2, generator=generator)
    x = torch.rand(ROWS, 1, generator=generator) * 10 - 5
    return x, height * torch.sin(x + 3 * phase)


def learned(stage: int | None) -> tuple[float, dict[str, torch.Tensor]]:
    """Five steps of MAML, with derivatives of second order. The last loss, of all tasks, and the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if stage is not None else (1, 0)
    if stage is not None:
        shardproof.shard(model, stage, units=["0"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        losses = []
        for number in range(TASKS)[rank::ranks]:
            x, y = task(TASKS * step + number)
            fast = {name: p.clone() for name, p in model.named_parameters()}
            for _ in range(2):
                loss = F.mse_loss(functional_call(model, fast, x), y)
                grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {name: p - 0.02 * grad for (name, p), grad in zip(fast.items(), grads, strict=True)}
            losses.append(F.mse_loss(functional_call(model, fast, x), y))
        mean = torch.stack(losses).mean()
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
    last = mean.detach().clone()
    if stage is None:
        return float(last), dict(model.named_parameters())
    dist.all_reduce(last)
    return float(last) / ranks, shardproof.full_state_dict(model, rank0_only=False)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_inner_steps_over_copies_are_those_of_one_process(run2, stage):
    loss, expected = learned(None)
    for found, values in run2(learned, stage):
        assert found == pytest.approx(loss, rel=1e-5)
        for name, value in values.items():
            assert torch.allclose(value, expected[name], atol=1e-6), name
