"""Promise: what few programs do with a sharded parameter gives what it gives in one process, and moves nothing that is
not needed for it."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardproof
from shardproof.errors import EngineError
from shardproof.zero.ranks.invariants import Invariants
from zero.models import CLASSES, FEATURES, HIDDEN, WIDTH, Net

X = torch.linspace(-1, 1, 4 * FEATURES).view(4, FEATURES)


def gradients_of_both(model: Net) -> list[torch.Tensor]:
    """Of a parameter and of an input, in one call."""
    x = X.clone().requires_grad_()
    return list(torch.autograd.grad(model(x).square().sum(), [x, model.head.weight, model.blocks[1].up.weight]))


def pickled(model: Net) -> list[torch.Tensor]:
    return [pickle.loads(pickle.dumps(of(model.head.weight))) for of in (lambda p: p, lambda p: p.data)]


def held_in_its_forward(model: Net) -> list[torch.Tensor]:
    """A block's own parameters, of which somebody has a list, while the block runs."""
    found, held = [], list(model.blocks[1].parameters())
    handle = model.blocks[1].norm.register_forward_hook(
        lambda *_: found.extend(value.clone() for p in held for value in (p * 2, p.detach()))
    )
    model(X)
    handle.remove()
    assert len(found) == 2 * len(held)
    return [value.detach() for value in found]


def tied_later(model: Net) -> list[torch.Tensor]:
    """A parameter gets a second place after the model was sharded."""
    model.blocks[2].up.weight = model.blocks[0].up.weight
    model(X).square().sum().backward()
    return [model.blocks[0].up.weight.grad, *(v for n, v in model.state_dict().items() if "up.weight" in n)]


def exchanged_and_lent(model: Net) -> list[torch.Tensor]:
    """The first to see that blocks have changed places is a forward whose parameters are not those of the model."""
    model.blocks[0], model.blocks[2] = model.blocks[2], model.blocks[0]
    lent = {name: p.clone() for name, p in model.named_parameters()}
    torch.func.functional_call(model, lent, (X,)).square().sum().backward()
    with torch.no_grad():
        return [model(X), *(p.grad for p in model.parameters())]


def attached_and_lent(model: Net) -> list[torch.Tensor]:
    """What was attached is seen behind such a forward."""
    torch.manual_seed(1)
    model.blocks[1].up = nn.Linear(WIDTH, HIDDEN)
    torch.func.functional_call(model, {name: p.detach() for name, p in model.named_parameters()}, (X,))
    model(X * (1 if not dist.is_initialized() else 1 + dist.get_rank())).sum().backward()
    assert type(model.blocks[1].up.weight) is type(model.head.weight)
    return [p.detach() * 1 for p in model.parameters()]


def stepped_without_gradients(model: Net) -> list[torch.Tensor]:
    """A step changes what has a gradient: a graph of the others stays good."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    loss = model(X).square().sum()
    model.embed.bias.grad = torch.ones(WIDTH)  # which no graph saves
    model.blocks[1].up.bias.grad = torch.ones(HIDDEN)
    optimizer.step()
    optimizer.zero_grad()
    loss.backward()
    return [p.grad for p in model.parameters()]


def differentiated_and_attached(model: Net) -> list[torch.Tensor]:
    """A graph of a weight that was plain then."""
    torch.manual_seed(1)
    model.head = nn.Linear(WIDTH, CLASSES)
    loss = model.head.weight.square().sum()
    with torch.no_grad():
        model(X)
    loss.backward()
    return [model.head.weight.grad]


USES = [
    gradients_of_both,
    pickled,
    held_in_its_forward,
    tied_later,
    exchanged_and_lent,
    attached_and_lent,
    stepped_without_gradients,
    differentiated_and_attached,
]


def used(use: Callable[[Net], list[torch.Tensor]], stage: int) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net())
    expected = use(models[0])
    for given, wanted in zip(use(shardproof.shard(models[1], stage)), expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(given.detach().clone()), wanted.detach())


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("use", USES)
def test_a_rare_use_is_that_of_one_process(run2, use, stage):
    run2(used, use, stage)


def test_a_step_changes_what_has_a_gradient_behind_the_first_steps_too(monkeypatch):
    monkeypatch.setattr(Invariants, "early", False)
    used(stepped_without_gradients, 3)


def of_what_one_rank_has_used(stage: int) -> None:
    """Gradients that are asked for are the mean over ranks on all of them, as those of a backward pass."""
    torch.manual_seed(0)
    model = shardproof.shard(nn.ModuleList(nn.Linear(3, 2) for _ in range(2)), stage, units=[])
    loss = model[dist.get_rank()](torch.ones(4, 3)).sum()
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(model[0](torch.ones(4, 3)).sum(), [model[1].bias])
    weights = [model[0].weight, model[1].weight]
    for grad in torch.autograd.grad(loss, weights, create_graph=True):
        torch.testing.assert_close(grad.detach() * 1, torch.full((2, 3), 2.0))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_of_what_another_rank_has_used_is_asked_for(run2, stage):
    run2(of_what_one_rank_has_used, stage)


@pytest.mark.parametrize("mix", [torch.Tensor.lerp_, lambda p, q, w: torch._foreach_lerp_([p], [q], w)])
def test_masters_are_mixed_with_values_in_the_dtype_of_computing(mix):
    model = shardproof.shard(Net(), 3, mixed_precision=torch.bfloat16)
    weight = model.head.weight
    expected = weight.local.detach().clone()
    for weighted in (0.25, torch.full_like(weight, 0.25)) if mix is torch.Tensor.lerp_ else (0.25,):
        with torch.no_grad():
            mix(weight, torch.ones_like(weight), weighted)
        expected.lerp_(torch.ones_like(expected), 0.25)
        assert torch.equal(weight.local, expected)


def converted() -> None:
    model = shardproof.shard(Net(), 3)
    before = shardproof.stats(model).total.gathers
    for like in (torch.Tensor.to, torch.Tensor.type_as):
        made = like(X.double(), model.head.weight)
        assert type(made) is torch.Tensor
        assert torch.equal(made, X)
    assert shardproof.stats(model).total.gathers == before


def test_a_conversion_to_the_dtype_of_a_parameter_gathers_nothing(run2):
    run2(converted)


def sent(stage: int) -> None:
    """One rank alone sends what another one receives into a tensor of its own. Neither has edited anything."""
    torch.manual_seed(0)
    model = shardproof.shard(Net(), stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = shardproof.full_state_dict(model, rank0_only=False)["head.weight"]
    model(X).sum().backward()
    if dist.get_rank() == 0:
        dist.send(model.head.weight.data, 1)
    else:
        received = torch.zeros(3, WIDTH)
        dist.recv(received, 0)
        assert torch.equal(received, whole)
    optimizer.step()
    assert model.head.weight.grad is not None


@pytest.mark.parametrize("stage", [0, 2])
def test_a_value_is_sent_to_another_rank(run2, stage):
    run2(sent, stage)


def rescaled() -> None:
    with pytest.raises(EngineError, match=r"'0' rescales its weight in each forward \(max_norm=1.0\)"):
        shardproof.shard(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), 3)


def test_an_embedding_that_rescales_itself_is_refused_on_several_ranks(run2):
    run2(rescaled)
    model = shardproof.shard(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), 3)
    assert float(model(torch.arange(4)).norm(dim=1).detach().max()) <= 1.0001
