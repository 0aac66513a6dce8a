"""What one forward has shown of parameters is shown to the next as well, with its node of the graph."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardproof
from shardproof.zero import autograd


class Acts(nn.Linear):
    """Has `act` do something to its weight in each forward."""

    act: Callable[[torch.Tensor], object] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.act is not None:
            self.act(self.weight)
        return super().forward(x)


class Layer(Acts):
    """Keeps what it has seen of its weight."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen[:] = [self.weight]
        return super().forward(x)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(4, 4), nn.Tanh(), Layer(4, 4))


def sharded(precision: torch.dtype | None = None) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = shardproof.shard(net(), 3, mixed_precision=precision)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def plain() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def seen_twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether two steps see one tensor."""
    step(model, optimizer)
    first = model[0].seen[0]
    step(model, optimizer)
    return model[0].seen[0] is first


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_forwards_see_the_same_tensor(precision):
    model, optimizer = sharded(precision)
    step(model, optimizer)
    assert seen_twice(model, optimizer)


def test_they_do_of_what_is_frozen():
    model, optimizer = sharded()
    model[0].requires_grad_(False)
    assert seen_twice(model, optimizer)


def test_not_where_a_gather_has_several_nodes(monkeypatch):
    monkeypatch.setattr(autograd, "SMALL", 0)
    assert not seen_twice(*sharded())


def seen_twice_at(stage: int) -> bool:
    model = shardproof.shard(net(), stage)
    return seen_twice(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("stage", [0, 2])
def test_where_ranks_hold_everything_they_do(run2, stage):
    assert run2(seen_twice_at, stage) == [stage == 0] * 2


def gradients_of_two_forwards(hooked: bool) -> list[torch.Tensor]:
    """With a hook on rank 0 alone, as `wandb.watch` has it, from which on it would reduce more often than the other."""
    model = shardproof.shard(net(), 0, dynamic="never")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    if hooked and dist.get_rank() == 0:
        model[0].weight.register_hook(lambda grad: None)
    (model(torch.ones(2, 4)).sum() + model(-torch.ones(2, 4)).square().sum()).backward()
    return [p.grad.whole().clone() for p in model.parameters()]


def test_a_hook_on_one_rank_makes_no_rank_reduce_more_often(run2):
    with_it, without = run2(gradients_of_two_forwards, True), run2(gradients_of_two_forwards, False)
    for got, expected in zip(with_it[0] + with_it[1], without[0] + without[1], strict=True):
        assert torch.equal(got, expected)


def test_what_is_frozen_for_a_while_is_shown_as_that():
    model, optimizer = sharded()
    step(model, optimizer)
    for flag in (False, True):
        model[0].weight.requires_grad_(flag)
        step(model, optimizer)
        assert model[0].seen[0].requires_grad == flag


def test_what_is_shown_are_the_values_of_now_where_somebody_held_a_view_and_somebody_looked_first():
    model, optimizer = sharded(torch.bfloat16)
    step(model, optimizer)
    with torch.no_grad():
        held = model[0].weight[1:]  # so that values come into another buffer
    for _ in range(2):
        step(model, optimizer)
        penalty = sum(p.square().sum() for p in model.parameters())
        model(torch.ones(2, 4))
        assert torch.equal(model[0].seen[0], model[0].weight.whole())
        penalty.backward()
        optimizer.zero_grad()
    assert not torch.equal(held, model[0].weight[1:])


def test_a_copy_shows_its_own():
    model, optimizer = sharded()
    step(model, optimizer)
    model[0].seen.clear()
    model[2].seen.clear()
    other = copy.deepcopy(model)
    weight = other[0].weight.whole().clone()
    step(model, optimizer)
    other(torch.ones(2, 4)).sum().backward()
    assert other[0].weight.grad is not None
    assert torch.equal(other[0].seen[0], weight)


@pytest.mark.parametrize("times", [1, 2])
def test_gradients_of_two_forwards_are_added_as_finely_as_gradients_are_kept(times):
    """In bf16 their sum is 256 and not 257."""
    torch.manual_seed(0)
    layer = shardproof.shard(nn.Linear(1, 1), 3, mixed_precision=torch.bfloat16)
    for _ in range(2):
        (layer(torch.ones(1, 1)) + times * layer(torch.full((1, 1), 256 / times))).sum().backward()
        assert layer.weight.grad.item() == 257
        layer.zero_grad()


class Holds:
    """Leads from a parameter back to its model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: object) -> None:
        assert self.model is not None


def lead_back(model: nn.Module, way: str) -> None:
    holds, weight = Holds(model), model[2].weight
    if way == "hook":
        weight.register_hook(holds)
    elif way == "post hook":
        weight.register_post_accumulate_grad_hook(holds)
    elif way == "attribute":
        weight.of = holds
    elif way == "attribute of one's own":
        weight._of = holds
    elif way == "attribute of what is attached":
        layer = nn.Linear(4, 4)
        layer.weight.of = holds
        model.append(layer)
    else:
        model[0].act = lambda shown: shown.register_hook(holds)


WAYS = [
    "hook",
    "post hook",
    "attribute",
    "attribute of one's own",
    "attribute of what is attached",
    "hook of what is shown",
]


@pytest.mark.parametrize("when", ["before", "behind"])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_goes_that_its_parameters_lead_to(way, when):
    """Through a node of the graph Python would see no circle."""
    model = shardproof.shard(nn.Sequential(Acts(4, 4), nn.Tanh(), nn.Linear(4, 4)), 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if when == "behind":
        step(model, optimizer)
    lead_back(model, way)
    step(model, optimizer)
    step(model, optimizer)
    there = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert there() is None


WHAT_FORWARDS_DO = {
    "a hook": lambda w: w.register_hook(lambda grad: 2 * grad),
    "its gradient kept": lambda w: w.retain_grad() if not w.is_leaf else None,
    "other data": lambda w: setattr(w, "data", w.data * 0.9),
    "an edit": lambda w: w.data.mul_(0.9),
    "an edit that is counted": lambda w: w.detach().mul_(0.9),
}


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("what", WHAT_FORWARDS_DO)
def test_what_a_forward_does_to_them_is_as_in_torch(what, early):
    """A plain parameter keeps hooks for good, so there the hook is there in one step only."""
    ours, theirs = sharded(), plain()
    for number in range(12):
        for model, optimizer in (ours, theirs):
            does = early == (number < 2) and (what != "a hook" or number in (0, 11))
            model[0].act = WHAT_FORWARDS_DO[what] if does else None
            step(model, optimizer)
        if theirs[0][0].weight._backward_hooks:
            theirs[0][0].weight._backward_hooks.clear()
    for p, q in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        assert torch.allclose(p.whole(), q, rtol=1e-6, atol=1e-7)


def test_a_graph_that_waits_for_its_backward_keeps_its_node_to_itself():
    """Of three forwards the second and the third are differentiated together."""
    model = shardproof.shard(nn.Linear(1, 1), 3, mixed_precision=torch.bfloat16)
    first, second = model(torch.ones(1, 1)), model(torch.ones(1, 1))
    first.sum().backward()
    model.zero_grad()
    (second + model(torch.full((1, 1), 256.0))).sum().backward()
    assert model.weight.grad.item() == 257
