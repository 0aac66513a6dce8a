"""What an optimizer trains beside a sharded model stays alike on all ranks, or is refused once copies have parted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import shardproof
from distributed.harness import listening
from shardproof.errors import DesyncError
from shardproof.zero.optim import outside

STAGES = [0, 1, 2, 3]
FEATURES, CLASSES, ROWS = 8, 5, 8


def rows_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of this rank, of `ROWS` in all."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(ROWS, FEATURES, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return x[rank::ranks], y[rank::ranks]


def trained(stage: int, how: str, steps: int = 5) -> Any:
    """A model, and a head of its loss that is no part of it. The last loss over all ranks' rows, or the error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))
    if how == "own values":
        torch.manual_seed(dist.get_rank())
    head, scale = nn.Linear(FEATURES, CLASSES), nn.Parameter(torch.rand(()) + 0.5)
    whole = nn.ModuleDict({"model": model, "head": head})
    whole.scale = scale
    if how == "part of it":
        shardproof.shard(whole, stage)
    else:
        shardproof.shard(model, stage)
        if how == "sharded as well":
            shardproof.shard(head, stage)
            scale.requires_grad_(False)
    params = list(whole.named_parameters())
    frozen = how in ("sharded as well", "an optimizer of its own")
    inside = [(n, p) for n, p in params if not (frozen and n == "scale")]
    if how == "an optimizer of its own":
        inside = [(n, p) for n, p in inside if n.startswith("model")]
    if how == "rate of zero":
        inside = [
            {"params": [p for n, p in inside if (n[0] == "m") == trains], "lr": 0.5 * trains} for trains in (1, 0)
        ]
    if how == "one rank has none" and dist.get_rank() == 0:
        inside = [(n, p) for n, p in inside if n.startswith("model")]
    optimizers = [torch.optim.SGD(inside if how != "without names" else [p for _, p in inside], lr=0.5)]
    if how == "an optimizer of its own":
        optimizers.append(torch.optim.SGD([*head.parameters(), scale], lr=0.5))
    loss = torch.zeros(())
    try:
        for step in range(steps):
            x, y = rows_of(step)
            loss = F.cross_entropy(whole.scale * whole["head"](whole["model"](x)), y)
            loss.backward()
            if how == "averaged":
                for p in (*head.parameters(), scale):
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()
            if how == "clipped":
                nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if how == "values averaged":
                with torch.no_grad():
                    for p in (*head.parameters(), scale):
                        dist.all_reduce(p)
                        p /= dist.get_world_size()
    except DesyncError as error:
        return str(error)
    total = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return float(total)


def sharded(stage: int, how: str) -> tuple[Any, list[str]]:
    with listening() as lines:
        return trained(stage, how), lines


@pytest.mark.parametrize("how", ["left alone", "clipped"])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_a_ranks_own_rows_are_refused_by_name(run2, stage, how):
    for text, _ in run2(sharded, stage, how):
        if how == "clipped" and stage == 0:  # what is sharded was clipped by another factor on each rank
            assert text.startswith("'0.weight', '0.bias', '2.weight', '2.bias': the ranks hold different values.")
            assert "clipped by a norm that has others in it" in text
        else:
            assert text.startswith("'scale', 'head.weight', 'head.bias': trained by SGD beside a sharded model")
            assert "call shardproof.shard on their module as well" in text


def test_without_names_their_places_are_told(run2):
    for text, _ in run2(sharded, 3, "without names"):
        assert "param_groups[0]['params'][0] of shape ()" in text


@pytest.mark.parametrize("how", ["part of it", "sharded as well", "averaged", "values averaged"])
@pytest.mark.parametrize("stage", STAGES)
def test_what_has_the_gradient_of_all_rows_is_that_of_one_process(run2, stage, how):
    expected = trained_alone(how)
    for loss, lines in run2(sharded, stage, how):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert lines == []


def trained_alone(how: str) -> float:
    return trained(0, "sharded as well" if how == "sharded as well" else "part of it")


@pytest.mark.parametrize("stage", [0, 3])
def test_values_of_a_ranks_own_are_told_once(run2, stage):
    (loss, (line,)), (_, silent) = run2(sharded, stage, "own values")
    assert isinstance(loss, float)
    assert line.startswith("'scale', 'head.weight', 'head.bias': not sharded, and each rank trains values of its own")
    assert silent == []


@pytest.mark.parametrize("how", ["rate of zero", "one rank has none"])
@pytest.mark.parametrize("stage", [0, 3])
def test_what_no_step_moves_or_one_rank_has_alone_is_let_be(run2, stage, how):
    for loss, lines in run2(sharded, stage, how):
        assert isinstance(loss, float), loss
        assert lines == []


def test_gradients_are_looked_at_a_piece_at_a_time(monkeypatch):
    grad = torch.randn(1000)
    once = outside._place(grad)
    monkeypatch.setattr(outside, "_AT_ONCE", 96)
    assert outside._place(grad) == pytest.approx(once, rel=1e-5)
    assert once[1] == pytest.approx(float(grad.norm()), rel=1e-5)
    assert outside._place(grad.view(10, 100).to_sparse()) == pytest.approx(once, rel=1e-5)


def test_an_optimizer_of_its_own_trains_what_a_rank_has_for_itself(run2):
    for loss, lines in run2(sharded, 3, "an optimizer of its own"):
        assert isinstance(loss, float)
        assert lines == []


def joined_later(stage: int) -> list[str]:
    """A head, of which one part has no gradient, and another head from the second step on: each rank's are the same."""
    torch.manual_seed(0)
    model, heads = shardproof.shard(nn.Linear(FEATURES, FEATURES), stage), [nn.Linear(FEATURES, CLASSES) for _ in "ab"]
    optimizer = torch.optim.SGD([*model.parameters(), *heads[0].parameters(), nn.Parameter(torch.ones(3))], lr=0.1)
    with listening() as lines:
        for step in range(4):
            if step == 1:
                optimizer.add_param_group({"params": heads[1].parameters()})
            sum(head(model(torch.ones(2, FEATURES))).square().sum() for head in heads).backward()
            optimizer.step()
            optimizer.zero_grad()
    return lines


@pytest.mark.parametrize("stage", [0, 3])
def test_what_joins_an_optimizer_later_is_let_be(run2, stage):
    assert run2(joined_later, stage) == [[], []]


def dealt_out(stage: int) -> str:
    """Each rank steps parameters of its own, as `ZeroRedundancyOptimizer` does. The error, or nothing."""
    torch.manual_seed(0)
    model = shardproof.shard(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)), stage)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    try:
        for step in range(3):
            x, y = rows_of(step)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    except DesyncError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_step_other_parameters_are_refused(run2, stage):
    """Of a parameter that one rank steps alone, only its slice would change."""
    counts = ("1 on rank 0.", "3 on rank 1.")
    for told, count in zip(run2(dealt_out, stage), counts, strict=True):
        assert told.startswith(f"SGD does not step the same parameters on all ranks: {count}")
