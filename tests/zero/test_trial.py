"""Promise: an optimizer that nobody here knows sees slices where that is enough and whole parameters where it is not;
elsewhere it is refused or warned of. At every stage the numbers of one process, or a word."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import threading
from typing import Any

import pytest
import torch
from torch import nn

import shardproof
from distributed.harness import Sharded, parity
from shardproof.errors import EngineError
from shardproof.zero.optim.step import judged
from zero.graphs import CASES
from zero.models import FEATURES, Net
from zero.test_owners import AdamP, Shampoo


class Plain(torch.optim.Optimizer):
    """Gradient descent with momentum, written as users write it."""

    def __init__(self, params: Any, lr: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p]["mean"] = self.state[p].get("mean", 0) * group["momentum"] + self.seen(p)
                p.sub_(mean, alpha=group["lr"])

    def seen(self, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        return p.grad


class ByNorm(Plain):
    """As SGDSaI and LARS: the step is in the gradient's direction, as long as it likes."""

    def seen(self, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        return p.grad / (p.grad.norm() + 1e-8)


class MatricesOnly(Plain):
    """Weight decay for what has rows, as many recipes have it; a slice has none."""

    def seen(self, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        return p.grad + (0.1 * p if p.dim() > 1 else 0)


class LambdaAdam(torch.optim.AdamW):
    """Element-wise, whatever its name reminds of."""


class AdamWClipped(torch.optim.AdamW):
    """Clips each tensor by its own norm, as StableAdamW does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.grad.div_(max(1.0, float(p.grad.norm()) * 10))
        return super().step(closure)


class ByAllNorms(Plain):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for grad in grads:
            grad.div_(norm)
        super().step()


class ByPlace(Plain):
    """As GrokAdamW: the further behind a parameter is in its group, the slower it moves."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for place, p in enumerate(p for p in group["params"] if p.grad is not None):
                p.sub_(self.seen(p), alpha=group["lr"] * 0.9**place)


class OfMatrices(Plain):
    """Takes nothing else."""

    def seen(self, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        return p.grad * p.flatten(1).norm(dim=1).view(-1, *(1,) * (p.dim() - 1))


class Noisy(Plain):
    def seen(self, p: torch.Tensor) -> torch.Tensor:
        return super().seen(p) + 0.1 * torch.randn_like(p)


class NoisyByNorm(ByNorm):
    """By chance a little, and by the norm much more."""

    def seen(self, p: torch.Tensor) -> torch.Tensor:
        return super().seen(p) + 1e-4 * torch.randn_like(p)


class Decays(Plain):
    """By the norm of a parameter."""

    def __init__(self, params: Any, lr: float = 0.05, decay: float = 1e-12) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["weight_decay"] = decay

    def seen(self, p: torch.Tensor) -> torch.Tensor:
        return super().seen(p) + self.param_groups[0]["weight_decay"] * p.norm() * p


class WithModel(Plain):
    def __init__(self, params: Any, model: nn.Module, **options: Any) -> None:
        super().__init__(params, **options)
        self.model = model


class WithLock(Plain):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.lock = threading.Lock()


class Keeping(ByNorm):
    """Keeps its parameters in attributes, too, and its state beside torch's."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.all = [p for group in self.param_groups for p in group["params"]]
        self.counts = dict.fromkeys(self.all, 0)
        self.look = self.counted

    def counted(self, p: torch.Tensor) -> torch.Tensor:
        self.counts[p] += 1
        return self.seen(p)

    def step(self, closure: Any = None) -> None:
        for p in self.all:
            assert self.look(p) is not None
        super().step()


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(2, 3, 2, 2))]


@pytest.mark.parametrize(
    "make",
    [
        Plain,
        functools.partial(Plain, lr=0.0),
        lambda params: Decays(params, decay=0.0),
        torch.optim.AdamW,
        LambdaAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        functools.partial(LambdaAdam, lr=torch.tensor(1e-3), foreach=False),
        functools.partial(LambdaAdam, fused=True),
    ],
)
def test_element_wise_optimizers_see_slices(make):
    assert judged(make(parameters())) == (frozenset(), False, "")


@pytest.mark.parametrize("make", [ByNorm, AdamWClipped, MatricesOnly, Keeping, AdamP, torch.optim.Adafactor, Shampoo])
@pytest.mark.parametrize("rate", [0.0, 0.05])
def test_others_get_whole_parameters(make, rate):
    assert judged(make(parameters(), lr=rate)) == (frozenset({0}), False, "")


def test_what_fails_with_slices_gets_whole_parameters():
    assert judged(OfMatrices([p for p in parameters() if p.dim() > 1])) == (frozenset({0}), False, "")


def test_each_group_is_tried_with_its_own_options():
    class ByGroup(ByNorm):
        def seen(self, p):
            whole = any(p is other for group in self.param_groups if group.get("norm") for other in group["params"])
            return super().seen(p) if whole else Plain.seen(self, p)

    a, b, c = parameters()
    optimizer = ByGroup([{"params": [a, c], "norm": None}, {"params": [b], "norm": True}])
    assert judged(optimizer).whole == {1}
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert judged(optimizer).whole == {1}
    optimizer.param_groups[0]["norm"] = 1.0  # switches that somebody turns later
    assert judged(optimizer).whole == {0, 1}
    optimizer.param_groups[2]["norm"] = True
    assert judged(optimizer).whole == {0, 1, 2}


class Large(ByNorm):
    """As optax's factored moments: matrices of 128 and more on both sides only."""

    def seen(self, p: torch.Tensor) -> torch.Tensor:
        return super().seen(p) if p.dim() == 2 and min(p.shape) >= 128 else Plain.seen(self, p)


class WithHelper(torch.optim.AdamW):
    """Changes a helper of torch's, and not `step`."""

    def _init_group(self, group: Any, *lists: Any) -> Any:
        for p in (p for p in group["params"] if p.grad is not None):
            p.grad.div_(p.grad.norm())
        return super()._init_group(group, *lists)


class Prepared(ByNorm):
    """Makes its state when it is made, as Adagrad does."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["mean"] = torch.zeros_like(p)

    def seen(self, p: torch.Tensor) -> torch.Tensor:
        assert "mean" in self.state[p]
        return super().seen(p)


class PreparedLater(ByNorm):
    """Makes it when it first meets a parameter."""

    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            if p not in self.state:
                self.state[p]["met"] = True
            assert self.state[p]["met"]
        super().step()


class WithOthers(ByNorm):
    """Keeps a module of Python's and a function without a name."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.where, self.rate = torch, lambda: 1.0


class WithModes(ByNorm):
    """Steps in the mode of training only, in which it is not yet."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.trains = False

    def train(self) -> None:
        self.trains = True

    def step(self, closure: Any = None) -> None:
        assert self.trains
        super().step()


class Late(ByNorm):
    """Does so after five steps, as RAdam begins to adapt."""

    def seen(self, p: torch.Tensor) -> torch.Tensor:
        self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
        return super().seen(p) if self.state[p]["steps"] > 5 else Plain.seen(self, p)


class Clipped(ByNorm):
    """Where a gradient is larger than most are."""

    def seen(self, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        return super().seen(p) if p.grad.norm() > 100 else p.grad


def of_vectors(params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return Clipped([p for p in params if p.dim() == 1], lr=lr)


@pytest.mark.parametrize(
    "make",
    [Large, WithHelper, Prepared, PreparedLater, WithOthers, Decays, WithModes, Late, NoisyByNorm, of_vectors],
)
def test_less_common_ways_to_look_at_a_whole_parameter_are_found(make):
    torch.optim.AdamW(parameters())  # which puts its `step` into its class
    assert judged(make(parameters(), lr=0.1)) == (frozenset({0}), False, "")


def test_what_is_of_one_step_or_of_a_parameter_is_no_part_of_a_trial():
    scaled = LambdaAdam(parameters(), fused=True)
    scaled.found_inf = torch.ones(())  # as GradScaler says that this step is left out
    scaled.register_step_post_hook(nn.Linear(2, 2).forward)
    assert judged(scaled) == (frozenset(), False, "")
    large = Prepared([nn.Parameter(torch.randn(80, 80))])  # whose state is too large for what an optimizer may keep
    assert judged(large) == (frozenset({0}), False, "")
    stepped = ByNorm(parameters())
    stepped.__dict__["_shardproof_steps"] = 1
    for p in stepped.param_groups[0]["params"]:
        stepped.state[p]["mean"] = torch.empty(0)  # of a slice
    assert judged(stepped) == (frozenset({0}), False, "")


def test_what_is_written_on_a_parameter_is_read_in_a_trial():
    class Written(ByNorm):
        def seen(self, p):
            return super().seen(p) if getattr(p, "label", "") == "norm" else Plain.seen(self, p)

    params = parameters()
    assert judged(Written(params)).whole == frozenset()
    params[0].label = "norm"
    assert judged(Written(params)).whole == {0}


def test_an_optimizer_is_believed_in_what_it_says():
    optimizer = ByNorm(parameters())
    optimizer.elementwise = True
    assert judged(optimizer).whole == frozenset()
    optimizer = Plain(parameters())
    optimizer.elementwise = False  # whatever a trial would show
    assert judged(optimizer).whole == {0}


def test_groups_that_are_alike_are_tried_once():
    class Counting(Plain):
        seen_groups = 0

        def step(self, closure=None):
            Counting.seen_groups = max(Counting.seen_groups, len(self.param_groups))
            super().step()

    optimizer = Counting([{"params": [p], "lr": 0.1 * n} for n, p in enumerate(parameters() + parameters())])
    assert judged(optimizer) == (frozenset(), False, "")
    assert Counting.seen_groups == 3  # a vector, a matrix, a convolution


@pytest.mark.parametrize("make", [ByAllNorms, ByPlace])
def test_an_update_by_other_parameters_is_known_as_such(make):
    """Or by how many of them are in front, which are others on the rank that updates it whole."""
    assert judged(make(parameters())).across


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Noisy, "its step is random"),
        (lambda params: WithModel(params, nn.Linear(2, 2)), "it keeps a Linear"),
        (WithLock, "TypeError: cannot pickle '_thread.lock' object"),
        (functools.partial(Plain, lr=float("nan"), momentum=float("inf")), "it gave NaN or infinity"),
    ],
)
def test_why_nothing_is_known_is_said(make, reason):
    assert judged(make(parameters())) == (frozenset(), False, reason)


def test_a_trial_leaves_everything_as_it_is():
    params = parameters()
    optimizer = Keeping(params, lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)  # which puts its own `step` into the instance
    optimizer.step = functools.partial(pytest.fail, "the optimizer itself was asked to step")  # type: ignore[method-assign]
    optimizer.__dict__["found_inf"] = torch.ones(())
    before = [p.detach().clone() for p in params]
    optimizer.register_step_post_hook(lambda *args: pytest.fail("a hook was asked"))
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    assert judged(optimizer).whole == {0}
    assert torch.equal(torch.randn(3), expected)
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(params, before, strict=True))
    assert not optimizer.state
    assert set(optimizer.counts.values()) == {0}
    assert optimizer.param_groups[0]["lr"] == 0.05


class InAttribute(ByNorm):
    """Keeps its momentum where torch does not look."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.means: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.means[p] = self.means.get(p, 0) * 0.9 + self.seen(p)
                p.sub_(self.means[p], alpha=group["lr"])


def check(graph: str, optimizer: type, stage: int) -> None:
    options = {"optimizer": functools.partial(optimizer, lr=1e-2), "tolerance": 2e-6, "bits": False}
    parity(f"{graph} {optimizer.__name__}", dataclasses.replace(CASES[graph], **options), Sharded(stage))


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("optimizer", [Plain, ByNorm, AdamWClipped, MatricesOnly, InAttribute, Prepared])
def test_two_ranks_equal_one_process(run2, optimizer, stage):
    run2(check, "plain", optimizer, stage)


def refused(stage: int) -> str:
    model = shardproof.shard(Net(), stage)
    optimizer = ByAllNorms(model.parameters(), lr=0.1)
    model(torch.ones(2, FEATURES)).square().mean().backward()
    with pytest.raises(EngineError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_needs_all_parameters_is_refused(run2, stage):
    assert all("ByAllNorms needs all parameters at once" in text for text in run2(refused, stage))


def preconditioned(params: Any, lr: float) -> torch.optim.Optimizer:
    """As PEFT's create_riemannian_optimizer: what it does to gradients is in a closure, and so are the parameters."""
    kept = list(params)

    class Preconditioned(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in (p for p in kept if p.grad is not None):
                p.grad.copy_(p.grad / (1 + p.detach().norm()))
            return super().step(closure)

    return Preconditioned(kept, lr=lr)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_trial_does_not_touch_the_parameters_that_a_step_keeps(run2, stage):
    run2(check, "plain", preconditioned, stage)


def pairs_refused(stage: int) -> str:
    from peft.optimizers.lorafa import LoraFAOptimizer

    model = shardproof.shard(nn.Sequential(nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)), stage)
    group = {"params": list(model.parameters()), "names": ["q.lora_A", "q.lora_B"], "scaling_factors": [1.0, 1.0]}
    optimizer = LoraFAOptimizer([group], lr=0.1)
    model(torch.ones(2, 8)).square().mean().backward()
    if stage == 0:
        before = model[1].weight.detach().clone()
        optimizer.step()
        return "stepped" if not torch.equal(before, model[1].weight) else "nothing has moved"
    with pytest.raises(EngineError) as caught:
        optimizer.step()
    return str(caught.value)


def test_an_optimizer_of_pairs_that_no_trial_has_is_refused_by_name(run2):
    assert all("LoraFAOptimizer needs all parameters at once" in text for text in run2(pairs_refused, 3))
    assert run2(pairs_refused, 0) == ["stepped", "stepped"]


def warned(stage: int, make: Any = WithLock, closure: Any = None) -> list[str]:
    model = shardproof.shard(Net(), stage)
    optimizer = make(model.parameters(), lr=0.1)
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardproof").addHandler(handler)
    for _ in range(3):
        model(torch.ones(2, FEATURES)).square().mean().backward()
        optimizer.step(closure)
        optimizer.zero_grad()
    logging.getLogger("shardproof").removeHandler(handler)
    return [text for text in texts if "element-wise" in text]


def test_what_cannot_be_tried_is_warned_of_once_by_one_rank(run2):
    first, second = run2(warned, 3)
    assert ["WithLock" in text and "cannot pickle" in text for text in first] == [True]
    assert second == []
    assert run2(warned, 0) == [[], []]


class Sure(Plain):
    elementwise = True


def test_a_closure_is_warned_of_where_a_trial_did_without_it(run2):
    (text,), _ = run2(warned, 3, Plain, float)
    assert "could not be tried (it is given a closure)" in text
    assert run2(warned, 3, Sure, float) == run2(warned, 3, ByNorm, float) == [[], []]


RANDOM = {"Alice", "DASH", "Gravity", "Kron"}  # of pytorch_optimizer: no two processes agree
UNSTABLE = {"Conda", "Kate", "SOAP", "SPlus"}  # their first steps make a last bit into more
OWN_MEANS = {"DeMo", "DistributedMuon", "LoRARite", "Magma"}  # errors: they count elements, or look for pairs


def of_the_library(graph: str, stage: int) -> dict[str, str]:
    """What became of each optimizer that can be made of parameters and a learning rate."""
    import pytorch_optimizer

    answers = {}
    for name, cls in sorted(vars(pytorch_optimizer).items()):
        of_its_own = inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)
        if not of_its_own or cls.__module__.startswith("torch.") or name in RANDOM | UNSTABLE | OWN_MEANS:
            continue
        model = Net()
        try:
            optimizer = cls(model.parameters(), lr=1e-2)
            model(torch.ones(2, FEATURES)).square().mean().backward()
            optimizer.step()
        except Exception:  # it wants more: a closure, a model, matrices only
            continue
        try:
            check(graph, cls, stage)
            answers[name] = "equal"
        except EngineError:
            answers[name] = "refused"
        except AssertionError as e:
            answers[name] = str(e)
    return answers


@pytest.mark.slow
def test_the_optimizers_of_a_library_equal_one_process(run2):
    """Ninety of them with pytorch_optimizer 4.1.0, which needs nothing but torch: `pip install pytorch_optimizer`."""
    pytest.importorskip("pytorch_optimizer")
    answers = run2(of_the_library, "plain", 3)[0]
    assert [f"{name}: {text}" for name, text in answers.items() if text not in ("equal", "refused")] == []
    assert list(answers.values()).count("equal") > 75
