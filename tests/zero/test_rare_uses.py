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
from zero.models import FEATURES, WIDTH, Net

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


USES = [gradients_of_both, pickled, held_in_its_forward, tied_later]


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
