"""Promise: what is silently wrong elsewhere is seen here, early, with the names of the parameters."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import shardproof
from distributed.harness import listening
from zero.graphs import ComputedAgain
from zero.models import FEATURES, Block, Net

STAGES = [0, 1, 2, 3]


def said(train) -> list[str]:
    """What the engine's logger said on this rank."""
    with listening() as lines:
        train()
    return lines


def steps(model: torch.nn.Module, *optimizers: torch.optim.Optimizer, count: int = 12) -> None:
    for _ in range(count):
        model(torch.ones(2, FEATURES, dtype=next(model.parameters()).dtype)).float().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()


def healthy(stage: int) -> list[str]:
    model = shardproof.shard(Net(), stage)
    model.blocks[1].requires_grad_(False)
    params = list(model.parameters())
    optimizers = torch.optim.AdamW(params[::2], lr=1e-3), torch.optim.SGD(params[1::2], lr=1e-2)
    return said(lambda: steps(model, *optimizers))


@pytest.mark.parametrize("stage", STAGES)
def test_a_healthy_run_hears_nothing(run2, stage):
    assert run2(healthy, stage) == [[], []]
    assert healthy(stage) == []


def unfreezes(stage: int, after: int) -> list[str]:
    """After so many steps the rest of the model is trained, too, by an optimizer of its own."""
    model = shardproof.shard(Net(), stage)
    model.blocks.requires_grad_(False)
    first = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def train() -> None:
        steps(model, first, count=after)
        model.blocks.requires_grad_(True)
        steps(model, first, torch.optim.SGD(model.blocks.parameters(), lr=1e-3), count=14 - after)

    return said(train)


@pytest.mark.parametrize("after", [8, 9, 10])
def test_what_was_just_unfrozen_has_an_optimizer_soon(run2, after):
    assert run2(unfreezes, 3, after) == [[], []]


def without_a_head(stage: int) -> list[str]:
    model = shardproof.shard(Net(), stage)
    params = [p for name, p in model.named_parameters() if not name.startswith("head")]
    return said(lambda: steps(model, torch.optim.AdamW(params, lr=1e-3)))


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_that_no_optimizer_knows_is_named(run2, stage):
    (line,), silent = run2(without_a_head, stage)
    assert "no optimizer updates them: 'head.weight', 'head.bias'." in line
    assert silent == []


def twice(stage: int) -> list[str]:
    model = shardproof.shard(Net(), stage)
    optimizers = [torch.optim.SGD(p, lr=1e-3) for p in (model.parameters(), model.head.parameters())]
    return said(lambda: steps(model, *optimizers, count=1))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_of_two_optimizers_is_named(run2, stage):
    (line,), _ = run2(twice, stage)
    assert line.startswith("'head.weight', 'head.bias': updated by two optimizers in one step")


def too_small(stage: int, lr: float, dtype: torch.dtype) -> list[str]:
    torch.manual_seed(0)
    model = Net().to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.abs_().add_(0.5)
    shardproof.shard(model, stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    return said(lambda: steps(model, optimizer, count=2))


@pytest.mark.parametrize("stage", STAGES)
def test_updates_that_are_lost_in_half_precision_are_named(run2, stage):
    (line,), _ = run2(too_small, stage, 1e-5, torch.bfloat16)
    assert "the first step of AdamW did not change them: '" in line
    assert "mixed_precision=torch.bfloat16" in line
    assert run2(too_small, stage, 1e-5, torch.float32) == [[], []]
    assert run2(too_small, stage, 0.0, torch.float32) == [[], []]  # a warm-up begins with nothing


class GivesItsParameters(Block):
    """To a Function, inside of its forward: they are gathered values there."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return ComputedAgain.apply(self.inner, h, *self.parameters())


def loses(stage: int) -> list[str]:
    torch.manual_seed(0)
    model = shardproof.shard(Net(GivesItsParameters), stage)
    return said(lambda: steps(model, count=2))


class OwnRate(torch.optim.Optimizer):
    """Finds its rate itself, as transformers' Adafactor does, or asks a function for it."""

    elementwise = True

    def __init__(self, params, lr) -> None:
        super().__init__(params, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for group in self.param_groups:
            rate = group["lr"](self.steps) if callable(group["lr"]) else 0.1 / self.steps
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=rate)


def with_a_rate_of_its_own(stage: int | None) -> list[list[float]]:
    found = []
    for lr in (None, lambda step: 0.1 / step):
        torch.manual_seed(0)
        model = Net() if stage is None else shardproof.shard(Net(), stage)
        assert said(lambda: steps(model, OwnRate(model.parameters(), lr), count=3)) == []  # noqa: B023
        with torch.no_grad():
            found.append(model(torch.ones(1, FEATURES)).flatten().tolist())
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_learning_rate_need_not_be_a_number(run2, stage):
    alone = with_a_rate_of_its_own(None)
    assert alone[0] == alone[1]
    for outputs in run2(with_a_rate_of_its_own, stage):
        for got, expected in zip(outputs, alone, strict=True):
            assert got == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_what_backward_computes_again_are_missed(run2, stage):
    """Once for each unit, not in each step."""
    for lines in run2(loses, stage):
        blocks = [line.partition("' was computed once more")[0] for line in lines if "computed once more" in line]
        assert sorted(blocks) == ["'blocks.0", "'blocks.1", "'blocks.2"]


def asks_for_others(stage: int) -> list[str]:
    """An attack on the input, with blocks that are computed again: their own gradients nobody wants here."""
    torch.manual_seed(0)
    model = shardproof.shard(Net(), stage)

    def attack() -> None:
        x = torch.ones(2, FEATURES, requires_grad=True)
        h = model.embed(x)
        for block in model.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        torch.autograd.grad(model.head(h).sum(), x)

    return said(attack)


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_that_nobody_asks_for_are_not_missed(run2, stage):
    assert run2(asks_for_others, stage) == [[], []]


def drifting(kind: str) -> str:
    model = shardproof.shard(Net(), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps(model, optimizer, count=1)
    if kind == "edit" and dist.get_rank() == 1:
        with torch.no_grad():
            model.blocks[1].up.weight.local.mul_(1.001)  # as an operation that is not the same on every rank would
    try:
        steps(model, optimizer, count=1)
    except shardproof.DesyncError as error:
        return str(error)
    return ""


def test_replicas_that_differ_are_named(run2):
    assert run2(drifting, "nothing") == ["", ""]
    for text in run2(drifting, "edit"):
        assert text.startswith("'blocks.1.up.weight': the ranks hold different values.")
