"""What torch's own test suites of DistributedDataParallel and FSDP hold, and ours did not."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward

import shardproof
from distributed.harness import Case, Env, Sharded, parity
from shardproof.checkpoint.api import load_weights
from shardproof.errors import EngineError
from zero.models import CLASSES, FEATURES, WIDTH, Block, Net

# -- what would replace the engine, or never be called -----------------------------------------------------------------


def wrapped_by_fsdp2(stage: int) -> None:
    model = Net()
    fully_shard(model.blocks[0])
    with pytest.raises(EngineError, match=r"'blocks.0' is wrapped in FSDPBlock, which does what shardproof.shard does"):
        shardproof.shard(model, stage)
    model = shardproof.shard(Net(), stage)
    fully_shard(model)
    with pytest.raises(EngineError, match=r"The model is wrapped in FSDPNet, which does what shardproof.shard does"):
        model(torch.ones(2, FEATURES))


@pytest.mark.parametrize("stage", [0, 3])
def test_fully_shard_before_and_behind_is_refused(run2, stage):
    run2(wrapped_by_fsdp2, stage)


def test_an_optimizer_in_backward_is_refused_before_and_behind():
    model = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, model.head.parameters(), {"lr": 0.1})
    with pytest.raises(EngineError, match=r"'head.weight' has an optimizer from _apply_optimizer_in_backward"):
        shardproof.shard(model, 3)
    model = shardproof.shard(Net(), 3)
    with pytest.raises(EngineError, match=r"gradient accumulator of 'head.weight' was requested"):
        _apply_optimizer_in_backward(torch.optim.SGD, model.head.parameters(), {"lr": 0.1})
    assert model.head.weight.detach().view_as(model.head.weight).shape == model.head.weight.shape


@pytest.mark.parametrize("look", [torch.autograd.graph.get_gradient_edge, nn.Parameter.expand_as])
def test_what_accumulates_a_gradient_is_not_there(look):
    p = shardproof.shard(Net(), 3).head.weight
    with pytest.raises(EngineError, match=r"Use p.register_post_accumulate_grad_hook"):
        look(p) if look is not nn.Parameter.expand_as else look(p, p)


@pytest.mark.parametrize("convert", [nn.Module.double, nn.Module.float, lambda m: m.to(torch.float64)])
def test_a_conversion_does_not_swap_parameters_for_plain_ones(convert):
    """They would never train again, without a word."""
    model = shardproof.shard(Net(), 3)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        assert model.head.weight.detach().double().dtype == model.head.weight.double().dtype == torch.float64
        with pytest.raises(EngineError, match=r"'embed.weight' would be exchanged for a parameter that does not train"):
            convert(model)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


# -- what held, and had no case ----------------------------------------------------------------------------------------


class Named(NamedTuple):
    h: torch.Tensor
    kept: torch.Tensor


class NamedBlock(Block):
    """What goes from unit to unit is a named tuple."""

    def forward(self, t: Named) -> Named:
        return Named(self.inner(t.h), t.kept)


class NamedNet(Net):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        t = Named(self.embed(x), x[:, :WIDTH])
        for block in self.blocks:
            t = block(t)
        return self.norm(t.h + t.kept)


class Frozen(nn.Module):
    """Every second layer is frozen, and all are run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, FEATURES).requires_grad_(i % 2 > 0) for i in range(6)])
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, *self.layers]:
            x = layer(x).relu()
        return self.head(x)


class Tied(Net):
    """The head is called for pieces, the rest without it, and the head's weight is used elsewhere, too."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(WIDTH, CLASSES, bias=False)
        self.back.weight = self.head.weight


CASES = {
    "named_tuples_between_units": Case(functools.partial(NamedNet, NamedBlock)),
    "frozen_layers_between_others_run_twice": Case(Frozen),
}


def step(name: str, build: Callable[[], Any] = Net, **fields: Any) -> Callable[[Any], Any]:
    """Decorator: the function is the step of case `name`."""

    def add(fn: Any) -> Any:
        CASES[name] = Case(build, fn, **fields)
        return fn

    return add


@step("a_tied_head_called_for_pieces_without_sync", Tied)
def _(env: Env, model: Tied, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(())
    for micro in range(2):
        with env.no_sync(model) if micro == 0 else contextlib.nullcontext():
            h = model.encode(batch["x"] / (1 + micro))
            pieces = [piece.requires_grad_() for piece in h.detach().clone().chunk(2)]
            for piece, y in zip(pieces, batch["y"].chunk(2), strict=True):
                loss = F.mse_loss(model.head(piece) + model.back(piece).sin(), y) / 2
                loss.backward()
                total = total + loss.detach()
            h.backward(torch.cat([piece.grad for piece in pieces]))
    return total


@step("frozen_in_part_between_forwards_of_one_backward")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    model.requires_grad_(False)
    out = model(batch["x"] * 0.3)
    model.blocks[1].requires_grad_(True)
    out = out + model(batch["x"] * 0.7)
    model.requires_grad_(True)
    loss = F.mse_loss(out + model(batch["x"]), batch["y"])
    loss.backward()
    return loss


@step("whole_values_between_two_forwards_and_backward")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    out, sums = model(batch["x"]), []
    for _ in range(2):
        with env.whole(model), torch.no_grad():
            sums.append(torch.stack([p.sum() for p in model.parameters()]).sum())
        out = out + model(batch["x"] * 0.5)
    loss = F.mse_loss(out, batch["y"])
    loss.backward()
    return [loss, *sums]


@step("an_optimizer_for_each_parameter_stepped_in_backward", clip=None, skip_grads=True)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if env.k == 0:
        optimizers = {p: torch.optim.AdamW([p], lr=1e-2, eps=1e-4) for p in model.parameters()}

        def update(p: nn.Parameter) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
    loss = F.mse_loss(model(batch["x"]), batch["y"])
    loss.backward()
    return loss


@step("weights_and_biases_in_two_optimizers_one_cleared")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if env.k == 0:
        for kind in ("weight", "bias"):
            env.keep[kind] = torch.optim.AdamW([p for n, p in model.named_parameters() if kind in n], 1e-2, eps=1e-4)
    loss = F.mse_loss(model(batch["x"]), batch["y"])
    loss.backward()
    env.engine.before_step({"": model})
    for kind in ("weight", "bias"):
        env.keep[kind].step()
    env.keep["weight"].zero_grad()
    return loss


@step("gradients_held_while_others_are_assigned_or_cleared")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = F.mse_loss(model(batch["x"]), batch["y"])
    loss.backward()
    env.engine.before_step({"": model})
    up, down, norm = model.blocks[0].up.weight, model.blocks[0].down.weight, model.blocks[0].norm.weight
    first, second, third = up.grad, down.grad, norm.grad
    up.grad, norm.grad = torch.zeros_like(up), None
    second.mul_(0.5)
    env.keep["up"] = first
    up.grad = first * 0.5 + up.grad
    norm.grad = third
    model.blocks[1].up.bias.grad = 2 * model.blocks[2].up.bias.grad
    return loss


@pytest.mark.sampled
@pytest.mark.parametrize("name, stage", [(name, stage) for name in CASES for stage in (1, 3)])
def test_two_ranks_equal_one_process(run2, name, stage):
    run2(check, name, stage)


def check(name: str, stage: int) -> None:
    parity(name, CASES[name], Sharded(stage))


class Cached(nn.Linear):
    """Keeps what it computes of its weight, and computes it again behind `load_state_dict`."""

    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)
        self.told: list[tuple[list[str], list[str]]] = []
        self.register_load_state_dict_post_hook(Cached.look)

    def look(self, keys: Any) -> None:
        self.norm = float(self.weight.detach().norm())
        self.told.append((list(keys.missing_keys), list(keys.unexpected_keys)))


def looked_behind_loading(stage: int, how: str, folder: str) -> list[Any]:
    model, other = (shardproof.shard(nn.Sequential(Cached(), nn.Linear(CLASSES, 1)), stage) for _ in range(2))
    if how == "checkpoint":
        shardproof.save(model, None, folder).wait()
        shardproof.load(other, None, folder)
    else:
        state = shardproof.full_state_dict(model)
        if how == "in part" and torch.distributed.get_rank() == 0:
            state["2.weight"] = state.pop("1.bias")
        shardproof.load_full_state_dict(other, state, strict=how != "in part")
    return [other[0].norm == pytest.approx(float(model[0].weight.detach().norm())), *other[0].told]


@pytest.mark.parametrize("how", ["full_state_dict", "in part", "checkpoint"])
def test_hooks_behind_load_state_dict_are_called(run2, tmp_path, how):
    told = (["1.bias"], ["2.weight"]) if how == "in part" else ([], [])
    assert run2(looked_behind_loading, 3, how, str(tmp_path / "saved")) == [[True, told]] * 2


class Told(Cached):
    """Keeps more than tensors in a state dict, too."""

    calls = 0

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def test_so_they_are_in_a_plain_model_and_what_modules_add_comes_along(tmp_path):
    model, plain = shardproof.shard(nn.Sequential(Told()), 3), nn.Sequential(Told())
    model[0].calls = 5
    shardproof.save(model, None, tmp_path / "saved").wait()
    load_weights(plain, tmp_path / "saved")
    assert (plain[0].calls, plain[0].told) == (5, [([], [])])
    assert plain[0].norm == pytest.approx(float(model[0].weight.detach().norm()))
