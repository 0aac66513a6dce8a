"""Promise: any graph. Hypothesis draws training programs out of the pieces that break other engines, and compares.

A program is plain data, so that a failing one is printed whole, shrunk, and can be pasted into `replay`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from distributed.harness import Alone, Case, Env, Sharded, compare, train
from zero.models import WIDTH, Net

BLOCK = st.integers(0, 2)
WAYS = st.sampled_from(["call", "call", "inner", "reentrant", "nonreentrant", "no_grad", "detached"])
BEFORE = st.sampled_from(["evaluate", "inference", "freeze", "thaw", "edit", "edit_row", "drop_forward"])
EXTRA = st.sampled_from(["l2", "head_outside", "second_forward", "input_penalty", "weight_penalty"])
BACKWARD = st.sampled_from(["once", "once", "retain", "split", "reverse", "no_sync", "read", "evaluate_between"])

STEP = st.fixed_dictionaries(
    {
        "before": st.lists(st.tuples(BEFORE, BLOCK), max_size=2),
        "path": st.lists(st.tuples(BLOCK, WAYS), min_size=1, max_size=4),
        "extra": st.lists(st.tuples(EXTRA, BLOCK), max_size=2),
        "backward": BACKWARD,
    }
)
PROGRAM = st.fixed_dictionaries(
    {
        "stage": st.integers(0, 3),
        "tied": st.booleans(),
        "units": st.sampled_from([None, None, [], ["blocks.*", "head"]]),
        "frozen": st.lists(BLOCK, max_size=2),
        "steps": st.lists(STEP, min_size=2, max_size=4),
    }
)


def prepare(env: Env, model: Net, todo: str, block: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    if todo in ("evaluate", "inference"):
        with torch.inference_mode() if todo == "inference" else torch.no_grad():
            model(batch["x"])
    elif todo in ("freeze", "thaw"):
        block.requires_grad_(todo == "thaw")
    elif todo == "drop_forward":
        model(batch["x"])
    else:
        with torch.no_grad():
            if todo == "edit":
                block.up.weight.mul_(0.9).add_(0.01)
            else:
                block.down.weight[1].mul_(0.5)
                block.up.bias[0] = 0.25


def walk(model: Net, path: list[tuple[int, str]], h: torch.Tensor) -> torch.Tensor:
    for i, way in path:
        block = model.blocks[i]
        if way == "call":
            h = block(h)
        elif way == "inner":
            h = block.inner(h)
        elif way == "no_grad":
            with torch.no_grad():
                shift = block(h)
            h = h + 0.1 * shift
        elif way == "detached":
            h = h.detach() * 0.5 + block(h)
        else:
            h = checkpoint(block, h, use_reentrant=way == "reentrant")
    return h


def losses_of(model: Net, step: dict[str, Any], batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    x = batch["x"].clone().requires_grad_()
    first_order = not any(way == "reentrant" for _, way in step["path"])  # reentrant has no second derivative
    h = model.norm(walk(model, step["path"], model.embed(x)))
    loss = F.mse_loss(model.head(h), batch["y"])
    second = h.square().mean()
    for extra, i in step["extra"]:
        if extra == "l2":
            second = second + 1e-2 * sum(p.square().sum() for p in model.blocks[i].parameters())
        elif extra == "head_outside":
            loss = loss + F.linear(h, model.head.weight[:2], model.head.bias[:2]).square().mean()
        elif extra == "second_forward":
            second = second + model(batch["x"] * 0.5).square().mean()
        elif first_order:
            target = x if extra == "input_penalty" else model.head.weight
            (g,) = torch.autograd.grad(loss, target, create_graph=True)
            # of the batch's rows, the mean: g of the input carries 1 / rows already
            loss = loss + (g.square().sum() if extra == "weight_penalty" else g.sum(1).mean() * len(x))
    return [loss, second]


def run_step(program: dict[str, Any], env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    step = program["steps"][env.k]
    if env.k == 0:
        for i in program["frozen"]:
            model.blocks[i].requires_grad_(False)
    for todo, i in step["before"]:
        prepare(env, model, todo, model.blocks[i], batch)
    how = step["backward"]
    if how == "no_sync":
        with env.no_sync(model):
            sum(losses_of(model, step, batch)).backward()
    losses = losses_of(model, step, batch)
    if how == "evaluate_between":
        with torch.no_grad():
            model.eval()(batch["x"])
        model.train()
    if how in ("split", "reverse"):
        ordered = losses if how == "split" else losses[::-1]
        ordered[0].backward(retain_graph=True)
        ordered[1].backward()
    else:
        sum(losses).backward(retain_graph=how == "retain")
        if how == "read":
            norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
            losses.append(torch.stack(norms).sum())
            (0.5 * losses_of(model, step, batch)[0]).backward()
        if how == "retain":
            sum(losses).backward()
    return losses


class Start(Net):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        if tied:
            self.blocks[2].up.weight = self.blocks[0].up.weight
            self.blocks[1].norm.bias = self.norm.bias
        assert self.norm.bias.numel() == WIDTH


def differences(program: dict[str, Any]) -> str:
    """What differs between this rank of many and one process; empty if nothing does."""
    case = Case(
        build=lambda: Start(program["tied"]),
        step=lambda env, model, batch: run_step(program, env, model, batch),
        steps=len(program["steps"]),
        tolerance=5e-6,  # drawn programs reach larger values than chosen ones
    )
    expected = train(case, Alone())
    sharded = Case(**{**case.__dict__, "options": {"units": program["units"]}})
    try:
        compare(train(sharded, Sharded(program["stage"])), expected, case.tolerance)
    except (AssertionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def replay(program: dict[str, Any], run: Any) -> None:
    for text in run(2, differences, program):
        assert not text, text


COMMON = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck), "database": None}
A_LITTLE_OF_ALL = {
    "stage": 3,
    "tied": True,
    "units": None,
    "frozen": [1],
    "steps": [
        {
            "before": [("inference", 0)],
            "path": [(0, "nonreentrant"), (1, "call"), (0, "reentrant")],
            "extra": [("l2", 2)],
            "backward": "split",
        },
        {
            "before": [("thaw", 1), ("edit_row", 1)],
            "path": [(1, "call"), (2, "inner")],
            "extra": [("weight_penalty", 0)],
            "backward": "no_sync",
        },
    ],
}


@example(program=A_LITTLE_OF_ALL)
@settings(max_examples=12, **COMMON)
@given(program=PROGRAM)
def test_two_ranks_equal_one_process_on_drawn_programs(pools, program):
    replay(program, pools.run)


@pytest.mark.slow
@settings(max_examples=600, **COMMON)
@given(program=PROGRAM)
def test_two_ranks_equal_one_process_on_many_drawn_programs(pools, program):
    replay(program, pools.run)
