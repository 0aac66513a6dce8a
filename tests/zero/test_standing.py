"""Promise: where a process holds everything, what it gathered stays where it is, and nobody can tell."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardproof
from shardproof.zero import autograd
from shardproof.zero.checks import engine_of
from shardproof.zero.ranks.invariants import Invariants
from shardproof.zero.units.flat import Flat
from zero.models import FEATURES, Block, Net


def prepared(build: Callable[[], nn.Module] = Net, **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = shardproof.shard(build(), 3, **options)  # type: ignore[arg-type]
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: nn.Module, value: float = 1.0) -> torch.Tensor:
    return model(torch.full((2, FEATURES), value)).float().square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_gathered_buffers_stay_where_they_are_over_steps(precision):
    model, optimizer = prepared(mixed_precision=precision)
    where = []
    for _ in range(3):
        train(model, optimizer)
        where.append([flat.standing.buffer.data_ptr() for flat in engine_of(model).flats])
    assert where[0] == where[1] == where[2]


def test_a_step_fills_them_again_all_at_once(monkeypatch):
    """So that forwards gather nothing, but what somebody still holds a view of."""
    gathered = []
    alone = Flat.gather_alone
    monkeypatch.setattr(Flat, "gather_alone", lambda flat: (gathered.append(flat.index), alone(flat)))
    model, optimizer = prepared(mixed_precision=torch.bfloat16)
    train(model, optimizer)
    flats = engine_of(model).flats
    assert sorted(gathered) == [flat.index for flat in flats]
    train(model, optimizer)
    with torch.no_grad():
        held = model.head.weight[1:]
    train(model, optimizer)
    assert all(torch.equal(flat.gathered, flat.shard.bfloat16()) for flat in flats if flat.fresh)
    assert gathered[len(flats) :] == []
    loss_of(model)
    assert gathered[len(flats) :] == [model.head.weight.flat.index]
    assert not torch.equal(held, model.head.weight[1:])


def held_after_a_step(stage: int) -> list[bool]:
    model = shardproof.shard(Net(), stage, mixed_precision=torch.bfloat16)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [flat.standing.buffer is not None for flat in engine_of(model).flats]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_between_steps_only_a_process_that_holds_everything_holds_a_buffer(run2, stage):
    assert {held for rank in run2(held_after_a_step, stage) for held in rank} == {stage == 0}


@pytest.mark.parametrize("steps", [0, 1])
def test_who_holds_a_view_of_rounded_weights_keeps_their_values(steps):
    model, optimizer = prepared(mixed_precision=torch.bfloat16)
    for _ in range(steps):
        train(model, optimizer)
    weight = model.blocks[0].up.weight
    with torch.no_grad():
        held = weight.whole()
    before = held.clone()
    train(model, optimizer)
    train(model, optimizer)
    assert torch.equal(held, before)
    assert not torch.equal(model.blocks[0].up.weight.whole(), before)


def test_so_does_who_looked_before_any_forward_did():
    model, optimizer = prepared(mixed_precision=torch.bfloat16)
    weight = model.blocks[0].up.weight
    for _ in range(2):  # in a buffer that is new, and in one that took its place
        with torch.no_grad():
            held = weight[1:]
        before = held.clone()
        train(model, optimizer)
        train(model, optimizer)
        assert torch.equal(held, before)


def test_so_does_who_holds_one_of_a_model_that_is_unfrozen():
    model, _ = prepared(lambda: Net().bfloat16().requires_grad_(False), mixed_precision=torch.bfloat16)
    loss_of(model)
    held = model.blocks[0].up.weight.whole()
    before = held.clone()
    model.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    train(model, optimizer)
    assert torch.equal(held, before)


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", ["step", "fused", "edit", "edit of a frozen one", "load"])
def test_torch_refuses_a_graph_of_other_weights(monkeypatch, kind, precision):
    monkeypatch.setattr(Invariants, "early", False)
    torch.manual_seed(0)
    net = Net()
    net.blocks[1].up.weight.requires_grad_(kind != "edit of a frozen one")
    model = shardproof.shard(net, 3, mixed_precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=kind == "fused")
    train(model, optimizer)
    loss = loss_of(model)
    if kind.startswith("edit"):
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(2)
    elif kind == "load":
        model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    else:
        loss_of(model, 2.0).backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    train(model, optimizer)  # and then all is well again


def refused_on_ranks(stage: int, kind: str, precision: torch.dtype | None) -> bool:
    """Whether all weights are those of before where backward was refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Invariants, "early", False)
        torch.manual_seed(0)
        model = shardproof.shard(Net(), stage, mixed_precision=precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer)
        loss = loss_of(model)
        if kind == "edit":
            with torch.no_grad():
                model.blocks[1].up.weight.mul_(2)
        else:
            loss_of(model, 2.0).backward()
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return all(p.grad is None or not p.grad.whole().any() for p in model.blocks[0].parameters())


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", ["step", "edit"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_so_it_does_on_ranks_where_gathered_weights_stay(run2, stage, kind, precision):
    assert run2(refused_on_ranks, stage, kind, precision) == [True, True]


CHANGED = "modified by an inplace operation|were changed between the forward"


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("view", [lambda p: p.view(-1), lambda p: p[1:], lambda p: p.detach().t()])
def test_so_is_one_of_weights_that_were_edited_through_a_view(monkeypatch, view, early):
    monkeypatch.setattr(Invariants, "early", early)
    model, optimizer = prepared()
    train(model, optimizer)
    loss = loss_of(model)
    with torch.no_grad():
        view(model.blocks[1].up.weight)[0] = 3.0
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()


class EditsLate(Block):
    """Edits a weight in its forward that it has used."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        out = super().forward(h)
        with torch.no_grad():
            self.down.weight.mul_(0.9)
        return out


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_so_is_one_that_was_edited_behind_its_use_from_the_first_step_on(monkeypatch, precision, early):
    monkeypatch.setattr(Invariants, "early", early)
    model, _ = prepared(functools.partial(Net, EditsLate), mixed_precision=precision)
    with pytest.raises(RuntimeError, match=CHANGED):
        loss_of(model).backward()


class Edits(Block):
    """Edits a weight in its forward when told so."""

    edit = False

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.edit:
            with torch.no_grad():
                self.up.weight.mul_(2)
        return super().forward(h)


def test_a_graph_of_a_forward_that_has_edited_is_refused_as_well(monkeypatch):
    monkeypatch.setattr(Invariants, "early", False)
    model, optimizer = prepared(functools.partial(Net, Edits))
    train(model, optimizer)
    model.blocks[1].edit = True
    loss = loss_of(model)
    model.blocks[1].edit = False
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2)  # nothing else has changed
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class KeepsParameter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad @ weight, None


def test_so_is_one_that_has_saved_the_parameter_itself(monkeypatch):
    monkeypatch.setattr(Invariants, "early", False)
    model, _ = prepared()
    x = torch.ones(2, FEATURES, requires_grad=True)
    weight = next(p for p in model.parameters() if p.dim() == 2 and p.shape[1] == FEATURES)
    out = KeepsParameter.apply(x, weight).sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


class Adapts(Net):
    """Steps in the middle of its forward when told so, as test-time training does."""

    inner: torch.optim.Optimizer | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if self.inner is not None:
            for p in self.inner.param_groups[0]["params"]:
                p.grad = torch.ones_like(p)
            self.inner.step()
            self.inner.zero_grad()
        return out


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_a_step_inside_of_a_forward_is_kept(monkeypatch, precision, early):
    monkeypatch.setattr(Invariants, "early", early)
    model, optimizer = prepared(Adapts, mixed_precision=precision)
    train(model, optimizer)
    bias = model.head.bias
    before = shardproof.full_state_dict(model)["head.bias"].clone()
    model.inner = torch.optim.SGD([bias], lr=0.5)
    for _ in range(2):
        with torch.no_grad():
            loss_of(model)
    assert torch.allclose(shardproof.full_state_dict(model)["head.bias"], before - 1)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("in the middle of backward")


class Short(Net):
    """Leaves out what lies behind its embedding when told so."""

    short = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x) if self.short else super().forward(x)


def test_gradients_of_a_backward_that_ended_in_an_exception_are_not_in_the_next(monkeypatch):
    monkeypatch.setattr(autograd, "SMALL", 0)  # each has a node of its own
    model, _ = prepared(Short)
    hook = model.blocks[0].register_forward_hook(lambda module, args, output: Fails.apply(output))
    loss = loss_of(model)
    hook.remove()
    with pytest.raises(ValueError, match="in the middle"):
        loss.backward(create_graph=True)  # what lies behind the blocks has its gradients by then
    model.zero_grad()
    model.short = True
    loss_of(model).backward(create_graph=True)
    plain, _ = prepared(Short)
    plain.short = True
    loss_of(plain).backward(create_graph=True)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        got, wanted = (0 if x.grad is None else x.grad.whole() for x in (p, q))
        assert (got == wanted) if isinstance(got, int) else torch.equal(got, torch.zeros_like(got) + wanted)


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_gradients_of_what_was_frozen_for_a_moment_can_be_asked_for(precision):
    model, optimizer = prepared(mixed_precision=precision)
    train(model, optimizer)
    for p in model.parameters():
        p.requires_grad_(False)
        p.requires_grad_(True)
    assert all(grad.abs().sum() > 0 for grad in torch.autograd.grad(loss_of(model), list(model.parameters())))


def test_what_is_frozen_and_unfrozen_has_views_that_say_so():
    model, optimizer = prepared()
    train(model, optimizer)
    weight = model.blocks[0].up.weight
    weight.requires_grad_(False)
    train(model, optimizer)
    before = weight.whole().clone()
    train(model, optimizer)
    assert torch.equal(weight.whole(), before)
    weight.requires_grad_(True)
    train(model, optimizer)
    assert not torch.equal(weight.whole(), before)


def test_a_copy_has_views_of_its_own():
    model, optimizer = prepared()
    train(model, optimizer)
    other = copy.deepcopy(model)
    kept = other.blocks[0].up.weight.whole().clone()
    train(model, optimizer)
    train(model, optimizer)
    assert torch.equal(other.blocks[0].up.weight.whole(), kept)
    assert torch.equal(loss_of(other), loss_of(copy.deepcopy(other)))


def weights_after(stage: int, calls: int) -> list[torch.Tensor]:
    """Of a model that runs several times before it runs backward, in another order."""
    torch.manual_seed(0)
    model = shardproof.shard(Net(), stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        losses = [loss_of(model, 1.0 + i) for i in range(calls)]
        for loss in reversed(losses):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.whole().detach().clone() for p in model.parameters()]


def test_ranks_that_hold_everything_reduce_once_for_each_backward(run2):
    for found in run2(weights_after, 0, 3):
        for one, other in zip(found, weights_after(3, 3), strict=True):
            assert torch.allclose(one, other, rtol=1e-6, atol=1e-7)


def test_clipping_a_model_takes_in_what_was_frozen_since_and_what_is_not_sharded():
    """As going through its parameters does."""
    norms = []
    for whole in (True, False):
        model, _ = prepared()
        loss_of(model).backward()
        model.blocks[0].up.weight.requires_grad_(False)
        what = model if whole else list(model.parameters())
        norms.append(shardproof.clip_grad_norm_(what, 1e-3))
        again = shardproof.clip_grad_norm_(what, 1.0)
        assert float(again) == pytest.approx(1e-3, rel=1e-2)
    assert torch.equal(*norms)
    plain = Net()
    loss_of(plain).backward()
    wanted = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert torch.allclose(shardproof.clip_grad_norm_(plain, 1.0), wanted)


def attaches(model: nn.Module) -> None:
    """A parameter that no unit has."""
    model.scale = nn.Parameter(torch.ones(3))
    model.scale.sum().mul(2).backward()


def replaces(model: nn.Module) -> None:
    loss_of(model).backward()
    model.head.weight = nn.Parameter(torch.ones(3, 5))
    model.head.weight.sum().backward()


def removes(model: nn.Module) -> None:
    loss_of(model).backward()
    model.head = nn.Identity()


@pytest.mark.parametrize("change", [attaches, replaces, removes])
def test_clipping_a_model_takes_in_what_has_become_of_it(change):
    model, plain = prepared()[0], Net()
    plain.load_state_dict(shardproof.full_state_dict(model))
    for each in (model, plain):
        change(each)
    norm = shardproof.clip_grad_norm_(model, 0.1)
    assert torch.allclose(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.allclose(torch.as_tensor(p.grad.norm()), q.grad.norm())
