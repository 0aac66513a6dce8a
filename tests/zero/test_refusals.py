"""Promise: what is refused, or done in a way that few programs take, says and does what one process does."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardproof
from shardproof.errors import EngineError
from shardproof.zero.tensors.parameter import ShardedParameter
from zero.models import FEATURES, Net

X = torch.ones(2, FEATURES)


def test_what_is_no_model_or_made_where_nothing_trains():
    with pytest.raises(EngineError, match=r"takes a torch.nn.Module, not a list"):
        shardproof.shard([nn.Linear(2, 2)], 3)
    with torch.inference_mode(), pytest.raises(EngineError, match=r"outside of torch.inference_mode"):
        shardproof.shard(Net(), 3)


def in_order_over_copies() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(EngineError, match=r"deterministic=True needs a mesh of one dimension"):
        shardproof.shard(Net(), 3, mesh=mesh, deterministic=True)


def test_sums_in_one_order_over_copies(run2):
    run2(in_order_over_copies)


def some_of_the_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("job", "replicate", "shard"))
    half = mesh["replicate", "shard"]
    half._mesh_dim_names = None
    with pytest.raises(EngineError, match=r"dimensions have no names.*mesh_dim_names="):
        shardproof.shard(Net(), 3, mesh=half)


def test_a_mesh_of_some_ranks_without_names(run4):
    run4(some_of_the_ranks)


class Packed(nn.Parameter):
    """Of a kind that nobody knows."""


def test_parameters_that_cannot_be_cut_are_named():
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(EngineError, match=r"'0.weight' is not initialised yet\. Run one forward pass before"):
        shardproof.shard(lazy, 3)
    lazy(X)
    shardproof.shard(lazy, 3)
    model = Net()
    model.head.weight = Packed(model.head.weight.detach())
    with pytest.raises(EngineError, match=r"'head.weight' is a Packed, .* and it is trainable\. Freeze it"):
        shardproof.shard(model, 3)
    model = Net()
    model.head.weight = Packed(model.head.weight.detach(), requires_grad=False)
    shardproof.shard(model, 3)
    assert type(model.head.weight) is Packed


@pytest.mark.parametrize("stage", [0, 3])
def test_an_edit_in_place_of_what_is_trained_is_refused_as_in_torch(stage):
    plain, model = Net(), shardproof.shard(Net(), stage)
    for net in (plain, model):
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"):
            net.head.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"a leaf Variable that requires grad"):
            torch._foreach_mul_([net.head.weight], 2)


class Acts(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.act is not None:
            self.act(self.weight)
        return super().forward(x)


def refused_in_forward(stage: int, act: Callable[[torch.Tensor], object], frozen: bool, words: str) -> float:
    """The layer's weight is unfrozen and used once more behind the refusal: its gradient."""
    layer = Acts(2, 2)
    nn.init.ones_(layer.weight)
    layer.weight.requires_grad_(not frozen)
    model = shardproof.shard(layer, stage)
    model.act = act
    with pytest.raises((EngineError, RuntimeError), match=words):
        model(torch.ones(1, 2))
    assert type(model.weight) is ShardedParameter
    model.act = None
    model.weight.requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    return float(model.weight.grad.whole().sum())


def doubles(weight: torch.Tensor) -> None:
    weight.mul_(2)


def unfreezes(weight: torch.Tensor) -> None:
    weight.requires_grad_(True)


@pytest.mark.parametrize(("act", "words"), [(doubles, "leaf Variable.*'weight'"), (unfreezes, "'weight' was unfrozen")])
@pytest.mark.parametrize("stage", [0, 3])
def test_so_is_what_a_forward_does_to_plain_tensors_that_would_be_lost_with_them(run2, stage, act, words):
    assert refused_in_forward(stage, act, act is unfreezes, words) == 4
    assert run2(refused_in_forward, stage, act, act is unfreezes, words) == [4, 4]


@pytest.mark.parametrize("stage", [0, 3])
def test_data_of_another_shape_or_dtype_is_refused(stage):
    weight = shardproof.shard(Net(), stage).head.weight
    with pytest.raises(EngineError, match=r"'head.weight' has shape \(3, 5\) and was assigned data of shape \(1, 5\)"):
        weight.data = weight.data[:1]
    with pytest.raises(EngineError, match=r"'head.weight' is torch.float32 on cpu and was assigned torch.float64"):
        weight.data = torch.zeros(3, 5, dtype=torch.float64)


@pytest.mark.parametrize("stage", [0, 3])
def test_whole_does_not_begin_inside_of_a_forward(stage):
    class Inside(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with shardproof.whole(self):
                return super().forward(x)

    model = shardproof.shard(Inside(), stage)
    with pytest.raises(EngineError, match=r"cannot begin inside a forward pass"):
        model(X)
    with shardproof.whole(model):  # and nothing of it is left
        pass


@pytest.mark.parametrize("given", [[1, 2], {"head.weight": "x"}, None])
def test_what_is_no_state_dict(given):
    model = shardproof.shard(Net(), 3)
    with pytest.raises(EngineError, match=r"load_full_state_dict takes a dict of names and tensors"):
        shardproof.load_full_state_dict(model, given)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_that_a_loss_does_not_reach_is_named(stage):
    model = shardproof.shard(Net(), stage)
    inputs = [model.head.weight, model.embed.weight]
    with pytest.raises(RuntimeError, match=r"\('embed.weight'\) appears to not have been used in the graph"):
        torch.autograd.grad(model.head.weight.sum(), inputs)
    some, none = torch.autograd.grad(model.head.weight.sum(), inputs, allow_unused=True)
    assert torch.equal(some, torch.ones(3, 5))
    assert none is None
    assert torch.equal(
        torch.autograd.grad(model.head.weight.sum(), inputs, materialize_grads=True)[1], torch.zeros(5, FEATURES)
    )


def test_no_gradients_have_no_norm():
    model = shardproof.shard(Net(), 3)
    assert shardproof.clip_grad_norm_(list(model.parameters()), 1.0).item() == 0
    assert shardproof.clip_grad_norm_([], 1.0).item() == 0


def test_a_device_by_its_first_number_and_units_by_one_name():
    model = shardproof.shard(Net(), 3, device="cpu:0", units="Block")
    assert {str(p.device) for p in model.parameters()} == {"cpu"}
    assert [name for name in shardproof.stats(model).units if name.startswith("blocks")] == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
    ]


def rarely_done(stage: int | None) -> list[torch.Tensor]:
    """Values that a program sees of gradients that it keeps and takes away, and of a step whose closure has a name."""
    torch.manual_seed(0)
    model = Net()
    if stage is not None:
        shardproof.shard(model, stage)
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        found.append(optimizer.step(closure=closure).detach())
    kept = [model.head.weight.grad, model.head.bias.grad]
    del model.head.weight.grad
    assert model.head.weight.grad is None
    optimizer.zero_grad()
    model(2 * X).square().mean().backward()
    found += [grad.norm() for grad in kept]
    value = model.head.bias.detach().requires_grad_()
    (value * torch.arange(3.0)).sum().backward()
    found.append(value.grad.clone())
    del value.grad
    assert value.grad is None
    value.grad = torch.ones(3)
    found += [value.grad, model.head.weight.grad.norm()]
    return [torch.as_tensor(each).clone() for each in found]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_few_programs_do_gives_the_numbers_of_one_process(run2, stage):
    wanted = rarely_done(None)
    for answers in (rarely_done(stage), *run2(rarely_done, stage)):
        for here, there in zip(answers, wanted, strict=True):
            torch.testing.assert_close(here, there, atol=1e-6, rtol=1e-5)


class WaitsInside(nn.Module):
    """Its forward lets another thread try, and goes on when that is over."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(FEATURES, 3), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other, self.other = self.other, None
        if other is not None:
            other.start()
            other.join()
        return self.linear(x)


def two_threads(stage: int | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model, told = nn.Sequential(nn.Linear(FEATURES, FEATURES), WaitsInside()), []
    if stage is not None:
        shardproof.shard(model, stage, units=[WaitsInside])

    def second() -> None:
        with pytest.raises(EngineError, match=r"Two threads compute with a sharded model at the same time") as raised:
            model(X)
        told.append(raised.value)

    if stage:
        model[1].other = threading.Thread(target=second)
    model(X).square().mean().backward()
    assert len(told) == bool(stage)
    thread = threading.Thread(target=lambda: model(2 * X).square().mean().backward())
    thread.start()
    thread.join()
    return [p.grad.norm().clone() for p in model.parameters()]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_second_thread_that_computes_meanwhile(run2, stage):
    """The gathers of both would cross, and the ranks wait for each other for good. One after the other may."""
    wanted = two_threads(None)
    for answers in run2(two_threads, stage):
        torch.testing.assert_close(answers, wanted, atol=1e-6, rtol=1e-5)
