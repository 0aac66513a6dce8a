"""Promise: any path on any rank. Hypothesis draws what each rank does in each step, and compares with one process.

A program is plain data: a few kinds of step, each saying for each rank which batches it has and which blocks, in which
way, each batch goes through; and the order in which the kinds come. Kinds that repeat become plans, which others
then break.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import nn

import shardproof
from zero.models import CLASSES, FEATURES, Net
from zero.test_random_graphs import BLOCK, COMMON, Start, walk

WAYS = st.sampled_from(["call", "call", "inner", "reentrant", "nonreentrant", "no_grad", "detached"])
BATCH = st.fixed_dictionaries(
    {
        "path": st.lists(st.tuples(BLOCK, WAYS), max_size=4),
        "reads": st.lists(st.sampled_from(["l2", "head", "evaluate", "second_forward"]), max_size=2),
        "backwards": st.sampled_from(["one", "one", "two", "none"]),
    }
)
KIND = st.lists(st.lists(BATCH, max_size=3), min_size=2, max_size=2)  # [rank][batch]
PROGRAM = st.fixed_dictionaries(
    {
        "stage": st.integers(0, 3),
        "tied": st.booleans(),
        "units": st.sampled_from([None, None, [], ["blocks.*", "head"]]),
        "dynamic": st.sampled_from(["auto", "auto", "all"]),
        "keep_gathered": st.sampled_from([0, 0, 1_000, 10**9]),  # bytes: of some blocks, or of all
        "frozen": st.lists(BLOCK, max_size=1),
        "clip": st.booleans(),
        "kinds": st.lists(KIND, min_size=1, max_size=3),
        "order": st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=4),  # (kind, times)
    }
)


def losses_of(model: Net, batch: dict[str, Any], seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, FEATURES, generator=draw), torch.randn(2, CLASSES, generator=draw)
    h = model.norm(walk(model, batch["path"], model.embed(x)))
    losses = [F.mse_loss(model.head(h), y)]
    for read in batch["reads"]:
        if read == "l2":
            losses.append(1e-2 * sum(p.square().sum() for p in model.blocks[seed % 3].parameters()))
        elif read == "head":
            losses.append(F.linear(h.detach(), model.head.weight[:2], model.head.bias[:2]).square().mean())
        elif read == "second_forward":
            losses.append(model(x * 0.5).square().mean())
        else:
            with torch.no_grad():
                model.eval()(x)
            model.train()
    return losses


def run_batch(model: Net, batch: dict[str, Any], seed: int, scale: float) -> None:
    losses = [loss * scale for loss in losses_of(model, batch, seed)]
    if batch["backwards"] == "one":
        sum(losses).backward()
    elif batch["backwards"] == "two":
        losses[0].backward(retain_graph=True)
        others = [loss for loss in losses[1:] if loss.requires_grad]
        if others:
            sum(others).backward()


def run(program: dict[str, Any], model: Net, ranks: list[int], scale: float) -> None:
    for block in program["frozen"]:
        model.blocks[block].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)
    step = 0
    for kind, times in program["order"]:
        for _ in range(times):
            step += 1
            for rank in ranks:
                for k, batch in enumerate(program["kinds"][kind % len(program["kinds"])][rank]):
                    run_batch(model, batch, 100 * step + 10 * rank + k, scale)
            if program["clip"]:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def differences(program: dict[str, Any]) -> str:
    """What differs between the ranks together and one process; empty if nothing does."""
    torch.manual_seed(0)
    reference: nn.Module = Start(program["tied"])
    model = copy.deepcopy(reference)
    shardproof.shard(model, program["stage"], **{name: program[name] for name in ("units", "dynamic", "keep_gathered")})
    run(program, reference, [0, 1], 0.5)
    run(program, model, [dist.get_rank()], 1.0)
    expected = reference.state_dict()
    for name, value in shardproof.full_state_dict(model, rank0_only=False).items():
        if not torch.allclose(value, expected[name], atol=2e-5, rtol=2e-5):
            return f"{name} differs by {float((value - expected[name]).abs().max()):.1e}"
    return ""


def replay(program: dict[str, Any], run: Any) -> None:
    for text in run(2, differences, program):
        assert not text, text


def batch(*path: tuple[int, str], reads: tuple[str, ...] = (), backwards: str = "one") -> dict[str, Any]:
    return {"path": list(path), "reads": list(reads), "backwards": backwards}


A_PLAN_THAT_IS_BROKEN = {
    "stage": 3,
    "tied": True,
    "units": None,
    "dynamic": "auto",
    "keep_gathered": 0,
    "frozen": [],
    "clip": True,
    "kinds": [
        [[batch((0, "call"), (1, "nonreentrant"))], [batch((0, "call"), (1, "nonreentrant"))]],
        [[], [batch((2, "reentrant"), reads=("l2", "evaluate")), batch((1, "inner"), backwards="two")]],
    ],
    "order": [(0, 4), (1, 1), (0, 4), (1, 2)],
}


@example(program=A_PLAN_THAT_IS_BROKEN)
@settings(max_examples=12, phases=[Phase.explicit, Phase.generate], **COMMON)  # shrinking takes minutes: slow below
@given(program=PROGRAM)
def test_ranks_on_drawn_paths_equal_one_process(pools, program):
    replay(program, pools.run)


@pytest.mark.slow
@settings(max_examples=1500, **COMMON)
@given(program=PROGRAM)
def test_ranks_on_many_drawn_paths_equal_one_process(pools, program):
    replay(program, pools.run)
