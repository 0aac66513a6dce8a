"""Promise: what ends badly without a word elsewhere goes on right, or is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardproof
from shardproof.errors import DesyncError, EngineError
from zero.models import FEATURES, Net

STAGES = [0, 1, 2, 3]


class Block(nn.Module):
    stop = False

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stop:
            raise KeyboardInterrupt
        return x + self.a(x).tanh()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](self.first(x)))


def interrupted(stage: int, through_root: bool) -> tuple[list[float], list[float]]:
    """Losses without and with a Ctrl-C in the third forward pass, which is caught and tried again."""
    found = []
    for interrupt in (False, True):
        torch.manual_seed(0)
        model = shardproof.shard(Blocks(), stage)
        forward = model if through_root else model.forward
        x = torch.randn(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for step in range(5):
            if step == 2 and interrupt:
                model.layers[1].stop = True
                with pytest.raises(KeyboardInterrupt):
                    forward(x)
                model.layers[1].stop = False
            loss = forward(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert type(model.layers[1].a.weight).__name__ == "ShardedParameter"
        found.append(losses)
    return found[0], found[1]


@pytest.mark.parametrize("through_root", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_in_a_forward_pass_that_is_tried_again(run2, stage, through_root):
    for calm, caught in run2(interrupted, stage, through_root):
        assert caught == calm


def edited_on_one(stage: int, how: str) -> str:
    model = shardproof.shard(Net(), stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(4):
        if step == 3 and dist.get_rank() == 0:
            if how == "load":
                model.load_state_dict({"head.weight": torch.ones_like(model.head.weight)}, strict=False)
            else:
                with torch.no_grad():
                    model.head.weight.mul_(2)
        model(torch.ones(2, FEATURES)).sum().backward()
        try:
            optimizer.step()
        except DesyncError as error:
            return str(error)
        optimizer.zero_grad()
    return ""


@pytest.mark.parametrize("how", ["load", "edit"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_edit_on_one_rank_is_refused_at_the_next_step(run2, stage, how):
    for text in run2(edited_on_one, stage, how):
        assert text.startswith("'head.weight': edited or loaded on some ranks only")


def state_of_rank_0(stage: int, fresh: bool) -> str:
    """The optimizer's state as rank 0 has it, loaded by every rank."""
    model = shardproof.shard(nn.Linear(16, 16), stage)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    box = [copy.deepcopy(optimizer.state_dict())]
    own = box[0]
    dist.broadcast_object_list(box)
    if fresh:
        optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(own)
    step()  # one's own is taken
    optimizer.load_state_dict(box[0])
    model(torch.ones(2, 16)).sum().backward()
    shardproof.barrier(model)
    try:
        shardproof.zero.optimizer._check_loaded(optimizer, list(model.parameters()))
    except EngineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_the_state_of_another_rank_is_refused(run2, stage, fresh):
    first, second = run2(state_of_rank_0, stage, fresh)
    assert first == ""
    assert ("slices of rank 0 of 2; here are those of rank 1 of 2" in second) == (stage > 0)
