"""Promise: an optimizer that needs whole parameters gives the numbers of one process at every stage, and each rank
holds the state of the parameters it owns."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardproof
from distributed.harness import Case, Sharded, compare, parity, train
from shardproof.errors import EngineError
from zero.graphs import CASES
from zero.models import FEATURES, Net
from zero.test_hybrid import Hybrid


class WithRate(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})


class Shampoo(WithRate):
    """The update of Shampoo without momentum: L^(-1/4) G R^(-1/4), of a vector as of one row."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.reshape(p.shape[0] if p.dim() > 1 else 1, -1).double()
                state = self.state[p]
                for key, square in (("left", grad @ grad.T), ("right", grad.T @ grad)):
                    state[key] = state.get(key, 0) + square
                left, right = (self._root(state[key]) for key in ("left", "right"))
                p.sub_((left @ grad @ right).reshape(p.shape).to(p.dtype), alpha=group["lr"])

    @staticmethod
    def _root(square: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(square + 1e-2 * torch.eye(len(square), dtype=square.dtype))
        return vectors @ torch.diag(values.pow(-0.25)) @ vectors.T


class AdamP(WithRate):
    """Takes out of each row of an update what would only make the row of the weight longer; Adam by its name."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                update = self.state[p]["mean"] = self.state[p].get("mean", 0) * 0.9 + p.grad * 0.1
                if p.dim() > 1:
                    rows = p.flatten(1) / p.flatten(1).norm(dim=1, keepdim=True)
                    update = update - ((rows * update.flatten(1)).sum(1, keepdim=True) * rows).view_as(p)
                p.sub_(update, alpha=group["lr"])


class Unasking(WithRate):
    """A gradient of length one, of whatever stands in the groups: as public Muons, it takes for granted that there is
    a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


class Dealing(Unasking):
    """What one rank has updated, all get: for plain parameters, which every rank holds."""

    def step(self, closure: Any = None) -> None:
        dist.all_gather([torch.empty(1) for _ in range(dist.get_world_size())], torch.empty(1))
        super().step()


class MuonAndAdamW:
    """As Muon is used: matrices by it, the rest by AdamW."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        self.parts = [
            torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.02, weight_decay=0.1),
            torch.optim.AdamW([p for p in params if p.dim() != 2], lr=1e-2),
        ]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


class Growing:
    """Most parameters join after the second step, as where a model is unfrozen bit by bit."""

    def __init__(self, params: Any) -> None:
        self.params, self.steps = list(params), 0
        self.optimizer = torch.optim.Adafactor(self.params[:3], lr=0.05)

    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1
        if self.steps == 2:
            self.optimizer.add_param_group({"params": self.params[3:]})

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.params:
            p.grad = None


OPTIMIZERS = {
    "muon_and_adamw": MuonAndAdamW,
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.05),
    "shampoo": functools.partial(Shampoo, lr=0.05),
    "adamp": functools.partial(AdamP, lr=0.05),
}


def case(graph: str, optimizer: str, **options: Any) -> Case:
    # Orthogonalising in bfloat16, as Muon does, turns a last bit into more than one.
    loose = {"tolerance": 2e-3, "bits": False} if optimizer.startswith("muon") else {"tolerance": 2e-6, "bits": False}
    return dataclasses.replace(CASES[graph], optimizer=OPTIMIZERS[optimizer], **{**loose, **options})


def check(graph: str, optimizer: str, stage: int, rows: int = 1) -> None:
    engine = Sharded(stage) if rows == 1 else Hybrid(stage, rows)
    parity(f"{graph} {optimizer}", case(graph, optimizer), engine)


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("graph", ["plain", "tied_embedding_and_head", "a_parameter_used_only_now_and_then"])
def test_two_ranks_equal_one_process(run2, graph, optimizer, stage):
    run2(check, graph, optimizer, stage)


@pytest.mark.sampled
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_four_ranks_equal_one_process_with_copies_too(run4, optimizer, rows):
    run4(check, "plain", optimizer, 3, rows)


@pytest.mark.parametrize("stage", [1, 3])
def test_one_that_takes_gradients_for_granted(run2, stage):
    run2(unasking, stage)


def unasking(stage: int) -> None:
    own = dataclasses.replace(
        CASES["plain"], optimizer=functools.partial(Unasking, lr=0.05), tolerance=2e-6, bits=False
    )
    parity("plain, unasking", own, Sharded(stage))


def dealing(stage: int) -> None:
    model = shardproof.shard(Net(), stage)
    optimizer = Dealing(model.parameters(), lr=0.1)
    model(torch.ones(2, FEATURES)).square().mean().backward()
    if stage == 0:
        optimizer.step()
        return
    with pytest.raises(EngineError, match=r"Dealing deals parameters out to ranks itself .*all_gather"):
        optimizer.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_one_that_deals_out_parameters_itself_is_refused(run2, stage):
    run2(dealing, stage)


def same_bits(optimizer: str, options: dict[str, Any]) -> None:
    """Of two ranks there is one order of additions: the owner computes what every rank does at stage 0."""
    own = case("plain", optimizer, clip=None, skip_grads=True, options=options)
    compare(train(own, Sharded(3)), train(own, Sharded(0)), tolerance=0)


@pytest.mark.parametrize("options", [{}, {"mixed_precision": torch.bfloat16}])
@pytest.mark.parametrize("optimizer", ["adafactor", "shampoo"])
def test_stage_3_gives_the_bits_of_stage_0(run2, optimizer, options):
    run2(same_bits, optimizer, options)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def state_held() -> tuple[int, int]:
    model = shardproof.shard(Wide(), 3)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    held = sum(v.numel() for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))
    return held, sum(p.numel() for p in model.parameters())


def test_state_is_dealt_out_evenly(run4):
    answers = run4(state_held)
    assert {held for held, _ in answers} == {answers[0][1] // 4}


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, 8, bias=False) for width in (8, 8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(block(x[:, : block.in_features]).square().sum() for block in self.blocks)


def state_held_of_sizes(later: bool) -> int:
    """How much state this rank has of two small matrices, which may join later, and a large one."""
    model = shardproof.shard(Uneven(), 3)
    *small, large = model.parameters()
    optimizer = torch.optim.Muon([large] if later else [*small, large], lr=0.1)
    for step in range(2):
        if later and step:
            optimizer.add_param_group({"params": small})
        model(torch.ones(2, 16)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(v.numel() for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))


@pytest.mark.parametrize("later", [False, True])
def test_the_largest_is_dealt_first(run2, later):
    assert run2(state_held_of_sizes, later) == [128, 128]


def growing(stage: int) -> None:
    grown = dataclasses.replace(CASES["plain"], optimizer=Growing, steps=5, tolerance=2e-6)
    parity("optimizer that grows", grown, Sharded(stage))


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_that_join_later_take_no_state_from_its_owners(run2, stage):
    run2(growing, stage)


def in_an_order_of_its_own(optimizer: str) -> Callable[[Any], Any]:
    """Parameters as from a set of them, whose order differs between processes: on rank 1 the last one first."""
    backwards = dist.is_initialized() and dist.get_rank() == 1
    return lambda params: OPTIMIZERS[optimizer](list(params)[:: -1 if backwards else 1])


def orders_differ(optimizer: str, stage: int) -> None:
    one = case("plain", optimizer)
    parity("in another order", dataclasses.replace(one, optimizer=in_an_order_of_its_own(optimizer)), Sharded(stage))


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_may_give_parameters_in_another_order(run2, stage):
    run2(orders_differ, "adafactor", stage)


def exception_in_the_step(stage: int) -> None:
    """A step that ends in an exception on all ranks leaves weights that train on."""
    torch.manual_seed(0)
    model = shardproof.shard(Net(), stage)
    optimizer = Shampoo(model.parameters(), lr=0.1)
    x = torch.ones(2, FEATURES)
    model(x).square().mean().backward()
    before = shardproof.full_state_dict(model, rank0_only=False)
    root, optimizer._root = optimizer._root, lambda square: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    optimizer._root = root  # type: ignore[method-assign]
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    after = shardproof.full_state_dict(model, rank0_only=False)
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_an_exception_in_the_step_can_be_caught(run2):
    run2(exception_in_the_step, 3)


def lbfgs(stage: int) -> str:
    model = shardproof.shard(Net(), stage)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        loss = model(torch.ones(2, FEATURES)).square().mean()
        loss.backward()
        return loss

    closure()
    try:
        optimizer.step(closure)
    except EngineError as error:
        return str(error)
    return ""


def test_an_optimizer_over_all_parameters_is_refused_on_slices_and_works_on_wholes(run2):
    for stage in (1, 3):
        assert all("LBFGS" in text and "weight" in text for text in run2(lbfgs, stage))
    assert run2(lbfgs, 0) == ["", ""]
