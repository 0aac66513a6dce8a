"""Promise: any order of statements. Hypothesis draws programs of what loops do between two steps, and compares.

A program is plain data, a list of statements with two numbers each, which choose parameters, ways and factors. Graphs
wait while others are made, hooks come and go, copies and states are taken and put back. What a plain model says in the
same order of the same statements is expected: all values that were looked at, and where torch refuses backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardproof
from shardproof.zero.ranks.invariants import Invariants
from zero.models import CLASSES, FEATURES, Net
from zero.test_random_graphs import COMMON

Noted = list[tuple[str, torch.Tensor | None]]
STATEMENTS: dict[str, Callable[[Machine, int, int], None]] = {}
MOST_GRAPHS = 3  # that wait for their backward
REFUSED = "modified by an inplace operation|were changed between the forward"


def statement(do: Callable[[Machine, int, int], None]) -> Callable[[Machine, int, int], None]:
    STATEMENTS[do.__name__] = do
    return do


class Start(Net):
    """Three blocks, of which two may share a weight, or one may be frozen; blocks run in the ways that are set."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.ways = ["call"] * 3
        if kind == "tied":
            self.blocks[2].up.weight = self.blocks[0].up.weight
        elif kind == "frozen":
            self.blocks[0].requires_grad_(False)
            self.blocks[1].up.weight.requires_grad_(False)

    def run_block(self, block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        way = self.ways[list(self.blocks).index(block)]
        if way == "skip":
            return h
        if way == "twice":
            return block(block(h))
        return checkpoint(block, h, use_reentrant=False) if way == "checkpoint" else block(h)


class Machine:
    """Runs a program on one model, sharded unless `stage` is None, and notes what it sees."""

    def __init__(self, program: dict[str, Any], stage: int | None) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Start(program["kind"])
        if program["dtype"] == torch.bfloat16:
            self.model.bfloat16()
        self.stage, self.program = stage, program
        if stage is not None:
            shardproof.shard(self.model, stage, units=program["units"])
        self.divided = program["divided"] and stage is not None and dist.is_initialized()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.1)
        self.graphs: list[torch.Tensor] = []
        self.hooks: list[Any] = []
        self.copies: list[nn.Module] = []
        self.states: list[dict[str, torch.Tensor]] = []
        self.noted: Noted = []
        self.at = 0

    def run(self) -> Noted:
        for name, a, b in self.program["statements"]:
            STATEMENTS[name](self, a, b)
            self.at += 1
        look_at_gradients(self, 0, 0)
        look_at_values(self, 0, 0)
        return self.noted

    def note(self, what: str, value: torch.Tensor | None, mean: bool = False) -> None:
        if value is not None:
            value = (value.detach() * 1).float()
            if mean and self.divided:
                dist.all_reduce(value)
                value /= dist.get_world_size()
        self.noted.append((f"[{self.at}] {what}", value))

    def loss(self, model: nn.Module | None = None) -> torch.Tensor:
        draw = torch.Generator().manual_seed(self.at)
        x, y = torch.randn(4, FEATURES, generator=draw), torch.randn(4, CLASSES, generator=draw)
        if self.divided:
            x, y = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in (x, y))
        out = (model or self.model)(x.to(self.program["dtype"]))
        return F.mse_loss(out.float(), y)

    def wait(self, loss: torch.Tensor) -> None:
        self.note("loss", loss, mean=True)
        if loss.requires_grad and len(self.graphs) < MOST_GRAPHS:
            self.graphs.append(loss)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Where torch refuses, gradients are of a part of the graph, and nobody goes on with them."""
        try:
            loss.backward(**options)
        except RuntimeError as error:
            if not pytest.RaisesExc(RuntimeError, match=REFUSED).matches(error):
                raise
            self.note("refused", None)
            self.graphs.clear()
            self.model.zero_grad()

    def parameter(self, a: int) -> nn.Parameter:
        params = list(self.model.parameters())
        return params[a % len(params)]


# --- looking --------------------------------------------------------------------------------------


@statement
def look_at_values(m: Machine, a: int, b: int) -> None:
    whole = m.model.state_dict() if m.stage is None else shardproof.full_state_dict(m.model, rank0_only=False)
    for name, value in whole.items():
        m.note(name, value)


@statement
def look_at_gradients(m: Machine, a: int, b: int) -> None:
    for name, p in m.model.named_parameters():
        m.note(f"gradient of {name}", p.grad)


@statement
def evaluate(m: Machine, a: int, b: int) -> None:
    with torch.inference_mode() if a % 2 else torch.no_grad():
        for _ in range(1 + b % 3):
            m.note("evaluated", m.loss(), mean=True)


@statement
def change_ways(m: Machine, a: int, b: int) -> None:
    ways = ["call", "call", "checkpoint", "twice", "skip"]
    m.model.ways = [ways[(a + b * i) % 5] for i in range(3)]
    m.graphs.clear()


@statement
def forward(m: Machine, a: int, b: int) -> None:
    m.wait(m.loss())


@statement
def penalize(m: Machine, a: int, b: int) -> None:
    m.wait(0.1 * m.parameter(a).float().square().sum())


@statement
def differentiate_twice(m: Machine, a: int, b: int) -> None:
    loss, learning = m.loss(), [p for p in m.model.parameters() if p.requires_grad][a % 2 :: 2]
    found = torch.autograd.grad(loss, learning, create_graph=True, allow_unused=True)
    m.wait(loss + 0.1 * sum(g.float().square().sum() for g in found if g is not None))


@statement
def backward(m: Machine, a: int, b: int) -> None:
    if m.graphs:
        keep = b % 3 == 0
        m.backward(m.graphs[a % len(m.graphs)] if keep else m.graphs.pop(a % len(m.graphs)), retain_graph=keep)


@statement
def backward_of_all(m: Machine, a: int, b: int) -> None:
    if m.graphs:
        total = torch.stack(m.graphs).sum()
        m.graphs.clear()
        m.backward(total)


# --- gradients and steps --------------------------------------------------------------------------


@statement
def edit_gradient(m: Machine, a: int, b: int) -> None:
    p = m.parameter(a)
    if p.grad is None:
        return
    ways: list[Callable[[], Any]] = [
        lambda: p.grad.mul_(0.5),
        lambda: p.grad.add_(p.detach(), alpha=0.1),
        lambda: setattr(p, "grad", p.grad * 2),
        lambda: setattr(p, "grad", None),
        lambda: p.grad.data.clamp_(-0.01, 0.01),
        lambda: p.grad.copy_(torch.full_like(p, 0.02)),
    ]
    with torch.no_grad():
        ways[b % len(ways)]()


@statement
def clip(m: Machine, a: int, b: int) -> None:
    if any(p.grad is not None for p in m.model.parameters()):
        m.note("norm", nn.utils.clip_grad_norm_(m.model.parameters(), 0.3))


@statement
def step(m: Machine, a: int, b: int) -> None:
    m.optimizer.step()


@statement
def clear(m: Machine, a: int, b: int) -> None:
    m.optimizer.zero_grad(set_to_none=b % 3 > 0)


@statement
def train(m: Machine, a: int, b: int) -> None:
    loss = m.loss()
    m.note("loss", loss, mean=True)
    loss.backward()
    step(m, a, b)
    clear(m, a, b)


# --- values, hooks, copies, states -----------------------------------------------------------------


@statement
def edit(m: Machine, a: int, b: int) -> None:
    p = m.parameter(a)
    ways: list[Callable[[], Any]] = [
        lambda: p.mul_(0.9),
        lambda: p.copy_(p * 0.8 + 0.01),
        lambda: p.lerp_(torch.ones_like(p), 0.1),
        lambda: torch._foreach_mul_(list(m.model.parameters())[a % 2 :: 2], 0.97),
    ]
    with torch.no_grad():
        ways[b % len(ways)]()


@statement
def edit_data(m: Machine, a: int, b: int) -> None:
    p = m.parameter(a)
    m.graphs.clear()  # torch does not count these
    if b % 3 == 0:
        p.data.mul_(0.9)
    elif b % 3 == 1:
        p.data = p.data * 0.9 + 0.01
    else:
        p.data[0] = 0.1


@statement
def freeze(m: Machine, a: int, b: int) -> None:
    m.parameter(a).requires_grad_(b % 2 == 0)
    if "checkpoint" in m.model.ways:  # it would compute another graph than before, which torch refuses
        m.graphs.clear()


@statement
def exchange(m: Machine, a: int, b: int) -> None:
    blocks = m.model.blocks
    blocks[a % 3], blocks[b % 3] = blocks[b % 3], blocks[a % 3]


@statement
def hook(m: Machine, a: int, b: int) -> None:
    block, p = m.model.blocks[a % 3], m.parameter(a)
    if b % 3 == 0:
        m.hooks.append(block.register_forward_hook(lambda block, given, out: out * 0.9))
    elif b % 3 == 1:
        m.hooks.append(block.register_full_backward_pre_hook(lambda block, of: (of[0] * 0.7,)))
    elif p.requires_grad:
        m.hooks.append(p.register_hook(lambda grad: grad * 0.5))


@statement
def unhook(m: Machine, a: int, b: int) -> None:
    if m.hooks:
        m.hooks.pop(a % len(m.hooks)).remove()


@statement
def copy_model(m: Machine, a: int, b: int) -> None:
    if not m.hooks:
        m.copies = [copy.deepcopy(m.model).requires_grad_(b % 2 == 0)]


@statement
def average(m: Machine, a: int, b: int) -> None:
    for other in m.copies:
        with torch.no_grad():
            for old, new in zip(other.parameters(), m.model.parameters(), strict=True):
                old.lerp_(new, 0.3) if b % 2 else old.data.copy_(new.data * 0.5 + old.data * 0.5)
            m.note("average", m.loss(other), mean=True)


@statement
def save(m: Machine, a: int, b: int) -> None:
    m.states.append({name: value.clone() for name, value in m.model.state_dict().items()})


@statement
def load(m: Machine, a: int, b: int) -> None:
    if m.states:
        m.model.load_state_dict(m.states[a % len(m.states)])


# --- comparing ------------------------------------------------------------------------------------

OFTEN = ["forward", "backward", "backward_of_all", "step", "train", "clear"]
NUMBER = st.integers(0, 29)
PROGRAM = st.fixed_dictionaries(
    {
        "stage": st.integers(0, 3),
        "kind": st.sampled_from(["plain", "tied", "frozen"]),
        "dtype": st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
        "units": st.sampled_from([None, None, [], ["blocks.*", "head"]]),
        "divided": st.booleans(),  # whether two ranks have halves of each batch, or all of it
        "early": st.booleans(),  # whether graphs are those of the first steps
        "statements": st.lists(
            st.tuples(st.sampled_from([*STATEMENTS, *OFTEN * 3]), NUMBER, NUMBER), min_size=10, max_size=30
        ),
    }
)


def differences(program: dict[str, Any]) -> str:
    """What a sharded model says otherwise than a plain one; empty if nothing."""
    rounds = program["dtype"] == torch.bfloat16
    program = {**program, "divided": program["divided"] and not rounds}
    with pytest.MonkeyPatch.context() as patch:
        if not program["early"]:
            patch.setattr(Invariants, "early", False)
        expected, got = Machine(program, None).run(), Machine(program, program["stage"]).run()
    if [name for name, _ in got] != [name for name, _ in expected]:
        return next(f"{a} instead of {b}" for (a, _), (b, _) in zip(got, expected, strict=False) if a != b)
    for (name, a), (_, b) in zip(got, expected, strict=True):
        if (a is None) != (b is None):
            return f"{name} is {a} instead of {b}"
        if a is not None and b is not None and not torch.allclose(a, b, *((3e-2, 3e-2) if rounds else (2e-5, 2e-5))):
            return f"{name} differs by {float((a - b).abs().max()):.1e}"
    return ""


def replay(program: dict[str, Any], run: Any) -> None:
    for text in run(2, differences, program):
        assert not text, text


A_GRAPH_BEHIND_A_STEP = {
    "stage": 3,
    "kind": "tied",
    "dtype": torch.float32,
    "units": None,
    "divided": True,
    "early": False,
    "statements": [
        ("forward", 0, 0),
        ("hook", 1, 2),
        ("penalize", 1, 0),
        ("backward", 1, 1),
        ("step", 0, 0),
        ("unhook", 0, 0),
        ("backward", 0, 1),
        ("exchange", 0, 2),
        ("differentiate_twice", 0, 0),
        ("backward_of_all", 0, 0),
        ("train", 0, 1),
    ],
}


@example(program=A_GRAPH_BEHIND_A_STEP)
@settings(max_examples=30, phases=[Phase.explicit, Phase.generate], **COMMON)
@given(program=PROGRAM)
def test_one_process_says_what_a_plain_model_says(program):
    text = differences(program)
    assert not text, text


@example(program=A_GRAPH_BEHIND_A_STEP)
@settings(max_examples=8, phases=[Phase.explicit, Phase.generate], **COMMON)
@given(program=PROGRAM)
def test_two_ranks_say_what_a_plain_model_says(pools, program):
    replay(program, pools.run)


@pytest.mark.slow
@settings(max_examples=600, **COMMON)
@given(program=PROGRAM)
def test_two_ranks_say_so_in_many_programs(pools, program):
    replay(program, pools.run)
