"""What was frozen in half precision and is trained later has a master in float32, and buffers are dealt out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardproof

STAGES = [0, 1, 2, 3]
FEATURES, ROWS, STEPS, UNFROZEN_AT = 16, 8, 12, 4


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, FEATURES, generator=generator)


def model_in_half() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(3)]).to(torch.bfloat16)


def by_hand() -> list[torch.Tensor]:
    """Masters in float32, computing in bfloat16, gradients added in float32: one process, no engine."""
    model = model_in_half()
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.02)
    for step in range(STEPS):
        outputs = model(batch(step).bfloat16())
        outputs.float().square().mean().backward()
        for i, (p, master) in enumerate(zip(model.parameters(), masters, strict=True)):
            master.grad = p.grad.float() if i >= 2 or step >= UNFROZEN_AT else None
            p.grad = None
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
    return masters


def unfrozen(stage: int) -> list[torch.Tensor]:
    model = model_in_half()
    model[0].requires_grad_(False)
    shardproof.shard(model, stage, units=["*"], mixed_precision=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    for step in range(STEPS):
        if step == UNFROZEN_AT:
            model[0].requires_grad_(True)
        model(batch(step)[rank::ranks]).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.float() for value in shardproof.full_state_dict(model, rank0_only=False).values()]


@pytest.mark.parametrize("stage", STAGES)
def test_a_block_that_is_unfrozen_learns_in_float32(run2, stage):
    expected, start = by_hand(), [p.detach().float() for p in model_in_half().parameters()]
    for found in (unfrozen(stage), *run2(unfrozen, stage)):
        for value, wanted, before in zip(found, expected, start, strict=True):
            moved = (wanted - before).abs().max()
            assert moved > 0
            assert (value - wanted).abs().max() < 0.05 * moved


def with_buffers(stage: int) -> None:
    """Rank 0 has them from a checkpoint; of each kind, also of no dimension and not contiguous."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("table", torch.zeros(3, 2).t())
    model.register_buffer("seen", torch.zeros(5, dtype=torch.bool))
    shardproof.shard(model, stage)
    torch.manual_seed(7)
    given = {name: torch.rand(value.shape).to(value.dtype) for name, value in model.state_dict().items()}
    given["1.num_batches_tracked"] = torch.tensor(11)
    given["seen"] = torch.tensor([True, False, True, True, False])
    shardproof.load_full_state_dict(model, given if dist.get_rank() == 0 else {})
    for name, value in shardproof.full_state_dict(model, rank0_only=False).items():
        assert torch.equal(value, given[name]), name


@pytest.mark.parametrize("stage", STAGES)
def test_buffers_that_rank_0_has_loaded_are_those_of_all(run2, stage):
    run2(with_buffers, stage)


def rows_before(stage: int) -> list[float]:
    """Rows of a frozen matrix in half precision are filled in, and then it is trained."""
    model = nn.Linear(3, 4, bias=False).to(torch.bfloat16).requires_grad_(False)
    shardproof.shard(model, stage, mixed_precision=torch.bfloat16)
    model.weight.data[1:3].fill_(2)
    model.weight.requires_grad_(True)
    return [*model.weight[:, 0].tolist()[1:3], *shardproof.full_state_dict(model, False)["weight"][1:3, 2].tolist()]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_rows_that_were_filled_in_before_stay_so(run2, stage):
    assert run2(rows_before, stage) == [[2.0] * 4] * 2
