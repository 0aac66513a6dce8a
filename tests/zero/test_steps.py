"""Promise: what an optimizer's step does to parameters and gradients, it does to the model, however it does it."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardproof
from distributed.pool import RemoteError
from shardproof.errors import EngineError
from shardproof.zero.ranks.invariants import digest
from zero.models import FEATURES, Averages, Net

STAGES = [0, 1, 2, 3]


class Assigns(torch.optim.Optimizer):
    """Writes its update by `p.data = ...`; with `clears` it sets the gradients to None itself, and may fail midway."""

    clears = fails = replaces = False

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if self.fails and number == 1:
                raise RuntimeError("out of memory")
            if p.grad is not None:
                if self.replaces:
                    p.grad = p.grad * 0.5
                p.data = p.data - 0.1 * p.grad
                p.grad = None if self.clears else p.grad


class Clears(Assigns):
    clears = True


class Replaces(Assigns):
    replaces = True


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def loss_of(net: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
    return net(x).square().mean()


def assigned(kind: Any, shard: Callable[[nn.Module], Any]) -> list[float]:
    net = shard(model())
    optimizer, losses = kind(net.parameters()), []
    for step in range(4):
        loss = loss_of(net, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if not kind.clears:
            optimizer.zero_grad()
    return losses


def skips_a_step(kind: str, shard: Callable[[nn.Module], Any]) -> list[float]:
    """The second step fails midway, or is called off by a hook, and the loop goes on."""
    net = shard(model())
    optimizer, losses = Assigns(net.parameters()), []
    off = []

    def call_off(*_: Any) -> None:
        if off:
            raise RuntimeError("not this one")

    if kind == "hook":
        optimizer.register_step_pre_hook(call_off)
    for step in range(4):
        loss = loss_of(net, step)
        loss.backward()
        losses.append(loss.item())
        off[:] = [step] if step == 1 else []
        optimizer.fails = kind == "failure" and step == 1
        with pytest.raises(RuntimeError) if step == 1 else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()
    return losses


def hooks_see_whole_parameters(kind: str, shard: Callable[[nn.Module], Any]) -> list[float]:
    """Clipping before a step, and an average of weights after it, in hooks."""
    net = shard(model())
    optimizer, seen = torch.optim.SGD(net.parameters(), lr=0.1), []
    average = {name: p.detach().clone() for name, p in net.named_parameters()}

    def clip(optimizer: Any, *_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)

    def follow(optimizer: Any, *_: Any) -> None:
        with torch.no_grad():
            for value, p in zip(average.values(), optimizer.param_groups[0]["params"], strict=True):
                value.lerp_(p.detach() + 0, 0.5)
            seen.append(float(loss_of(net, 7)))

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(follow)
    for step in range(3):
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(float(value.sum()) for value in average.values())]


def edits_are_seen_by_slices(kind: str, shard: Callable[[nn.Module], Any]) -> list[float]:
    """A row is written through a view; norms, an average in a copy of the model, and `whole` know of it."""
    net = shard(model())
    loss_of(net, 0)
    average = copy.deepcopy(net)
    net[0].weight.data[0].fill_(3.0)
    norm = float(net[0].weight.detach().norm())
    net[0].weight.data[1].fill_(4.0)
    with torch.no_grad():
        for value, p in zip(average.parameters(), net.parameters(), strict=True):
            value.lerp_(p, 0.5)
    net[0].weight.data[2].fill_(5.0)
    if isinstance(net[0].weight.data, torch.Tensor) and "_shardproof" in net.__dict__:
        with shardproof.whole(net):
            assert float(net[0].weight[2, 0]) == 5.0
    return [norm, float(loss_of(average, 1)), float(loss_of(net, 1))]


def modes(kind: str, shard: Callable[[nn.Module], Any]) -> list[float]:
    net = model()
    net = shard(net) or net
    optimizer, losses = Averages(net.parameters()), []
    for step in range(4):
        optimizer.train()
        for _ in range(2):
            loss_of(net, step).backward()
            optimizer.train()  # Trainer says so before each micro-batch
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_of(net, 9).item())
        if step % 2:
            optimizer.eval()
            losses.append(loss_of(net, 9).item())
    return losses


def data_is_swapped(kind: str, shard: Callable[[nn.Module], Any]) -> list[float]:
    """As widely copied averages of weights do: `backup = p.data`, without a copy."""
    net = model()
    net = shard(net) or net
    optimizer, found = torch.optim.SGD(net.parameters(), lr=0.5), []
    shadow = {name: p.data.clone() for name, p in net.named_parameters()}
    for step in range(3):
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        backup = {name: (p.data, p.detach()) for name, p in net.named_parameters()}
        for name, p in net.named_parameters():
            p.data = shadow[name].clone()
        found += [float(loss_of(net, 9)), *(float(one.norm() + other.sum()) for one, other in backup.values())]
        for one, _ in backup.values():
            one.mul_(1.5)
        found.append(float(loss_of(net, 9)))
        for name, p in net.named_parameters():
            p.data = backup[name][1]
        found.append(float(loss_of(net, 9)))
        for _, other in backup.values():
            other.div_(1.5)  # it is the parameter's again
        found.append(float(loss_of(net, 9)))
    return found


def lbfgs(kind: str, shard: Callable[[nn.Module], Any]) -> list[float]:
    net = shard(model())
    optimizer, losses = torch.optim.LBFGS(net.parameters(), lr=0.3, max_iter=2), []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, 0)
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(4):
        optimizer.step(closure)
    return losses


CASES: list[tuple[Any, Any]] = [
    (assigned, Assigns),
    (assigned, Clears),
    (assigned, Replaces),
    (skips_a_step, "failure"),
    (skips_a_step, "hook"),
    (hooks_see_whole_parameters, ""),
    (edits_are_seen_by_slices, ""),
    (modes, ""),
    (data_is_swapped, ""),
]


def same_as_plain(stage: int) -> None:
    """Both ranks take the same rows, so that one process says what is right."""
    for case, kind in CASES + ([(lbfgs, "")] if stage == 0 else []):
        right = case(kind, lambda net: net)
        assert case(kind, lambda net: shardproof.shard(net, stage)) == pytest.approx(right, rel=1e-5), (case, kind)


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_do_what_one_process_does(run2, stage):
    run2(same_as_plain, stage)


def test_one_process_does_so_too():
    same_as_plain(0)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop", "Adagrad"])
def test_loaded_state_keeps_the_dtype_of_masters(kind):
    losses = []
    for loads in (False, True):
        net = shardproof.shard(model(), 0, mixed_precision=torch.bfloat16)
        optimizer = getattr(torch.optim, kind)(
            net.parameters(), lr=0.01, **({"momentum": 0.9} if kind == "SGD" else {})
        )
        for step in range(4):
            loss = loss_of(net, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if loads:
                optimizer.load_state_dict(optimizer.state_dict())
        losses.append(loss.item())
        state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
        assert {value.dtype for value in state} == {torch.float32}
    assert losses[0] == losses[1]


class FromTheStart(torch.optim.Optimizer):
    """Has state before its first step, of which only the mean, `mu`, is in the dtype of the parameter."""

    elementwise = True

    def __init__(self, params):
        super().__init__(params, {})
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"steps": 0, "signs": torch.zeros_like(p, dtype=torch.int8), "mu": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure=None):
        for p, state in self.state.items():
            state["steps"] += 1
            state["signs"].copy_(p.grad.sign())
            state["mu"].lerp_(p.grad, 0.5)
            p.sub_(0.1 * state["mu"])


def kinds_of_state(stage: int) -> list[object]:
    net = shardproof.shard(model(), stage, mixed_precision=torch.bfloat16)
    optimizer = FromTheStart(net.parameters())
    for step in range(2):
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state[next(net.parameters())]
    return [state["steps"], state["signs"].dtype, state["mu"].dtype]


@pytest.mark.parametrize("stage", [0, 3])
def test_state_from_the_start_is_of_masters_where_it_is_of_parameters(run2, stage):
    for found in run2(kinds_of_state, stage):
        assert found == [2, torch.int8, torch.float32]


class SAM(torch.optim.SGD):
    """Its name is what counts."""


def sharpness_of_slices(stage: int) -> None:
    net = shardproof.shard(model(), stage)
    loss_of(net, 0).backward()
    SAM(net.parameters(), lr=0.1).step()


@pytest.mark.parametrize("stage", STAGES)
def test_one_norm_over_all_slices_is_refused(run2, stage):
    if not stage:
        run2(sharpness_of_slices, stage)
        return
    with pytest.raises(RemoteError, match="SAM needs all parameters at once"):
        run2(sharpness_of_slices, stage)


def sparse(stage: int) -> None:
    net = shardproof.shard(nn.Embedding(5, 3, sparse=True), stage)
    net(torch.tensor([1, 2])).sum().backward()
    torch.optim.SparseAdam(net.parameters()).step()


@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_of_sparse_gradients_is_refused(run2, stage):
    with pytest.raises(RemoteError, match="gradients are dense once they are reduced"):
        run2(sparse, stage)


@pytest.mark.slow
def test_an_optimizers_step_may_be_compiled(run2):
    run2(compiled_step, 3)


def compiled_step(stage: int) -> None:
    losses = []
    for compiled in (False, True):
        net = shardproof.shard(model(), stage)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        take = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for step in range(3):
            loss = loss_of(net, step)
            loss.backward()
            take()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]


def other_edits(kind: str) -> None:
    net = shardproof.shard(model(), 2)
    rank = torch.distributed.get_rank()
    refused = pytest.raises(EngineError, match="on some ranks only")
    with refused, shardproof.whole(net, writeback=True), torch.no_grad():
        weight = net[0].weight
        weight.copy_(weight.roll(rank, 0) if kind == "rows in another order" else torch.zeros_like(weight))
        weight[rank, 0] += 0.25


@pytest.mark.parametrize("kind", ["rows in another order", "elsewhere"])
def test_the_same_numbers_in_other_places_are_other_edits(run2, kind):
    run2(other_edits, kind)


def test_a_digest_is_of_bits_and_places():
    value = torch.randn(1 << 21).to(torch.bfloat16)
    seen = {digest(value), digest(value.flip(0)), digest(value.roll(1 << 20)), digest(value.roll(1))}
    value[0], value[1] = value[0] + 1, value[1] - 1
    assert len({*seen, digest(value)}) == 5
    assert digest(value) == digest(value.clone())
    assert -(2**63) <= digest(value) < 2**63
    assert digest(torch.empty(0)) == 0


def test_inputs_are_cast_inside_of_whole_too():
    net = shardproof.shard(model(), 0, mixed_precision=torch.bfloat16)
    with torch.no_grad():
        outside = net(torch.ones(2, 3))
        with shardproof.whole(net):
            assert net(torch.ones(2, 3)).equal(outside)


def optimizer_from_before(stage: int | None, held: str) -> list[float]:
    """Somebody holds the parameters when the model is sharded, so that these objects cannot be exchanged themselves."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(torch.ones(2, FEATURES)).square().mean().backward()
    optimizer.step()  # it has state
    optimizer.zero_grad()
    kept = [weakref.ref(p) for p in model.parameters()] if held == "weak reference" else model(torch.ones(2, FEATURES))
    if stage is not None:
        shardproof.shard(model, stage)
    losses = []
    for _ in range(4):
        loss = model(torch.ones(2, FEATURES)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    del kept
    return losses


@pytest.mark.parametrize("held", ["weak reference", "graph"])
def test_an_optimizer_made_before_trains_what_stands_in_the_model(run2, held):
    expected = optimizer_from_before(None, held)
    assert expected[-1] < expected[0]
    for stage in (0, 2, 3):
        for losses in (optimizer_from_before(stage, held), *run2(optimizer_from_before, stage, held)):
            assert losses == pytest.approx(expected, rel=1e-5), stage


def list_from_before(stage: int | None, held: str) -> list[float]:
    """The same, and a list of the parameters is clipped and averaged."""
    torch.manual_seed(0)
    model = Net()
    params = list(model.parameters())
    kept = [weakref.ref(p) for p in params] if held == "weak reference" else model(torch.ones(2, FEATURES))
    if stage is not None:
        shardproof.shard(model, stage)
    found, average = [], [p.detach().clone() for p in params]
    optimizer = torch.optim.SGD(params, lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, FEATURES)).square().mean().backward()
        found.append(torch.nn.utils.clip_grad_norm_(params, 0.1))
        optimizer.step()
        torch._foreach_lerp_(average, params, 0.5)
        found += [mean.norm() for mean in average]
        average[0].lerp_(params[0].data, 0.5)
    found += [p.norm() for p in copy.deepcopy(model).parameters()] + [p.norm() for p in copy.deepcopy(params)]
    del kept
    return [float(value) for value in found]


@pytest.mark.parametrize("held", ["weak reference", "graph"])
def test_a_list_of_parameters_made_before_is_of_those_in_the_model(run2, held):
    expected = list_from_before(None, held)
    for stage in (0, 3):
        for found in (list_from_before(stage, held), *run2(list_from_before, stage, held)):
            assert found == pytest.approx(expected, rel=1e-5), stage


def hooked_after_accumulation(stage: int | None) -> tuple[int, list[float]]:
    torch.manual_seed(0)
    model, calls = Net(), []
    if stage is not None:
        shardproof.shard(model, stage)

    def halve(p: torch.Tensor) -> None:
        calls.append(float(p.grad.norm()))  # a look at a gradient, from inside
        p.grad.mul_(0.5)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve)
    model(torch.ones(2, FEATURES)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    model.head(torch.ones(2, model.head.in_features)).sum().backward()  # of the others nothing new
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    return len(calls), [float(p.grad.norm()) for p in model.parameters()]


def test_a_hook_after_accumulation_is_called_once_for_what_was_added(run2):
    calls, norms = hooked_after_accumulation(None)
    for stage in (0, 1, 2, 3):
        for found in (hooked_after_accumulation(stage), *run2(hooked_after_accumulation, stage)):
            assert found[0] == calls, stage
            assert found[1] == pytest.approx(norms, rel=1e-5)


def hooked_alone(stage: int) -> int:
    model, calls = shardproof.shard(Net(), stage), []
    model.head.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad is not None))
    model.head.bias.register_hook(lambda grad: None)  # one that only looks
    model(torch.ones(2, FEATURES)).square().mean().backward()
    return sum(calls)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_hook_of_one_parameter_is_called_when_backward_ends(run2, stage):
    assert run2(hooked_alone, stage) == [1, 1]


def hooked_before(stage: int) -> list[list[str]]:
    """What the hooks of a parameter saw, of which two are removed once the model is sharded."""
    model, calls, removed = Net(), [], []
    weight = model.head.weight
    for kind, register in (("gradient", weight.register_hook), ("grown", weight.register_post_accumulate_grad_hook)):
        register(lambda seen, kind=kind: calls.append(f"{kind} {tuple(seen.shape)}"))
        removed.append(register(lambda seen: calls.append("removed")))
    shardproof.shard(model, stage)
    for handle in removed:
        handle.remove()
    model(torch.ones(2, FEATURES)).square().mean().backward()
    return calls


@pytest.mark.parametrize("stage", [0, 3])
def test_hooks_from_before_a_model_is_sharded_stay_its_hooks(run2, stage):
    shape = tuple(Net().head.weight.shape)
    assert run2(hooked_before, stage) == [[f"gradient {shape}", f"grown {shape}"]] * 2


def frozen_before_backward(stage: int | None) -> list[bool]:
    torch.manual_seed(0)
    model = Net()
    if stage is not None:
        shardproof.shard(model, stage)
    loss = model(torch.ones(2, FEATURES)).square().mean()
    model.blocks[0].requires_grad_(False)
    loss.backward()
    return [p.grad is None for p in model.parameters()]


def test_what_is_frozen_before_backward_gets_no_gradient(run2):
    expected = frozen_before_backward(None)
    assert True in expected
    for stage in (0, 3):
        assert [frozen_before_backward(stage), *run2(frozen_before_backward, stage)] == [expected] * 3


@pytest.mark.parametrize("stage", [0, 3])
def test_a_forward_without_a_backward_leaves_nothing(run2, stage):
    """Of an operation that saves its own output the output would hold itself."""
    assert run2(left_by_forwards, stage) == [0, 0]


def left_by_forwards(stage: int) -> int:
    model = shardproof.shard(Net(), stage)
    seen = []

    def remember(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(kept := output.exp()))
        return kept

    model.blocks[1].register_forward_hook(remember)
    for _ in range(3):
        model(torch.ones(2, FEATURES)).sum()
    gc.collect()
    return sum(output() is not None for output in seen)


class DecaysInGradients(torch.optim.SGD):
    """As many optimizers do: weight decay is added to the gradient itself."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.grad.add_(p, alpha=0.5)
        return super().step(closure)


def norms_around_a_step(stage: int | None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    if stage is not None:
        shardproof.shard(model, stage)
    optimizer = DecaysInGradients(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).square().mean().backward()
    before = [p.grad.norm() for p in model.parameters()]
    optimizer.step()
    return [float(norm) for norm in (*before, *(p.grad.norm() for p in model.parameters()))]


@pytest.mark.parametrize("stage", [0, 3])
def test_norms_behind_a_step_are_of_what_it_has_made_of_gradients(run2, stage):
    expected = norms_around_a_step(None)
    for found in (norms_around_a_step(stage), *run2(norms_around_a_step, stage)):
        assert found == pytest.approx(expected, rel=1e-5)
