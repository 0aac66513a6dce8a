"""What ranks write to parameters and gradients is the same on all of them, or is refused at the end of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardproof
from shardproof.errors import DesyncError, StaleWeightsError
from zero.test_hybrid import mesh_of

STAGES = [0, 1, 2, 3]
FEATURES, CODES = 8, 6


class Quantizer(nn.Module):
    """A frozen codebook that forward moves towards the rows it is given. `how` it is moved, and whether by all rows."""

    def __init__(self, how: str = "counted", average: bool = False) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.code = nn.Parameter(torch.randn(CODES, FEATURES), requires_grad=False)
        self.how, self.average = how, average

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encode(x)
        nearest = torch.cdist(z, self.code).argmin(1)
        with torch.no_grad():
            taken = F.one_hot(nearest, CODES).float()
            sums, counts = taken.T @ z, taken.sum(0)
            if self.average:
                for values in (sums, counts):
                    dist.all_reduce(values)
            means = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], self.code)
            if self.how == "counted":
                self.code.lerp_(means, 0.1)
            elif self.how == "data":
                self.code.data.lerp_(means, 0.1)
            else:
                self.code.data = self.code.data.lerp(means, 0.1)
        return self.decode(z + (self.code[nearest] - z).detach())


def trained(model: nn.Module, edit: Callable[[nn.Module, int], None] | None = None, steps: int = 4) -> str:
    """The error that a run of `steps` ends with, if any. `edit` is called between backward and step."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    torch.manual_seed(100 + dist.get_rank())
    try:
        for step in range(steps):
            model(torch.randn(16, FEATURES)).pow(2).mean().backward()
            if edit is not None:
                with torch.no_grad():
                    edit(model, step)
            optimizer.step()
            optimizer.zero_grad()
        shardproof.full_state_dict(model)
    except DesyncError as error:
        return str(error)
    return ""


def quantized(stage: int, how: str, average: bool) -> str:
    torch.manual_seed(0)
    return trained(shardproof.shard(Quantizer(how, average), stage))


@pytest.mark.parametrize("how", ["counted", "data", "assigned"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_codebook_that_forward_moves_by_the_rows_of_a_rank_is_refused(run2, stage, how):
    for text in run2(quantized, stage, how, False):
        assert text.startswith("'code'")
        assert "the ranks have written different values" in text or "the ranks hold different values" in text


@pytest.mark.parametrize("how", ["counted", "data", "assigned"])
@pytest.mark.parametrize("stage", STAGES)
def test_one_that_moves_by_the_rows_of_all_ranks_is_trained(run2, stage, how):
    assert run2(quantized, stage, how, True) == ["", ""]


def by_rank(edit: Callable[[nn.Module, int], None], stage: int, in_groups: bool = False) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES))
    return trained(shardproof.shard(model, stage, mesh=mesh_of(2) if in_groups else None), edit)


def last_step(model: nn.Module, step: int) -> None:
    if step == 3:
        model[1].weight.add_(torch.full((FEATURES, FEATURES), float(dist.get_rank())))


def entry_of_a_state_dict(model: nn.Module, step: int) -> None:
    model.state_dict()["1.weight"].add_(torch.randn(FEATURES, FEATURES))


def loaded(model: nn.Module, step: int) -> None:
    model.load_state_dict({"1.weight": torch.randn(FEATURES, FEATURES)}, strict=False)


def assigned_gradient(model: nn.Module, step: int) -> None:
    model[1].weight.grad = torch.randn(FEATURES, FEATURES)


VALUES = {
    "tensor": lambda m, _: m[1].weight.lerp_(torch.randn(FEATURES, FEATURES), 0.5),
    "data": lambda m, _: m[1].weight.data.copy_(torch.randn(FEATURES, FEATURES)),
    "number": lambda m, _: m[1].weight.mul_(1 + dist.get_rank()),
    "broadcast": lambda m, _: m[1].weight.add_(torch.randn(FEATURES)),
    "row": lambda m, _: m[1].weight.__setitem__(dist.get_rank(), 1.0),
    "row of data": lambda m, _: m[1].weight.data[dist.get_rank()].fill_(1.0),
    "orthogonal": lambda m, _: nn.init.orthogonal_(m[1].weight),
    "foreach": lambda m, _: torch._foreach_add_([m[1].weight], [torch.randn(FEATURES, FEATURES)]),
    "out": lambda m, _: torch.add(torch.randn(FEATURES, FEATURES), 1, out=m[1].weight),
    "state dict": entry_of_a_state_dict,
    "load": loaded,
    "at the end": last_step,
}
GRADIENTS = {
    "noise": lambda m, _: m[1].weight.grad.add_(torch.randn(FEATURES, FEATURES)),
    "number": lambda m, _: m[1].weight.grad.mul_(1 + dist.get_rank()),
    "row": lambda m, _: m[1].weight.grad[0].add_(torch.randn(FEATURES)),
    "foreach": lambda m, _: torch._foreach_add_([m[1].weight.grad], [torch.randn(FEATURES, FEATURES)]),
    "assigned": assigned_gradient,
}


def edited(of: str, how: str, stage: int, in_groups: bool = False) -> str:
    return by_rank((VALUES if of == "values" else GRADIENTS)[how], stage, in_groups)


@pytest.mark.parametrize("how", VALUES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_value_that_differs_between_ranks_is_refused(run2, stage, how):
    for text in run2(edited, "values", how, stage):
        assert text.startswith(tuple(f"'1.weight': the ranks {do} different values" for do in does(how, stage)))


def does(how: str, stage: int) -> list[str]:
    """At stage 0 a view of a parameter is a view of its values: an edit through it is found by comparing these."""
    return ["have written", *(["hold"] if stage == 0 and how in ("row of data", "orthogonal") else [])]


@pytest.mark.parametrize("how", GRADIENTS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_differs_between_ranks_is_refused(run2, stage, how):
    for text in run2(edited, "gradients", how, stage):
        assert text.startswith("the gradients of '1.weight': the ranks have written different values")
        assert f"{__file__}:" in text


@pytest.mark.parametrize("how", ["tensor", "row of data"])
@pytest.mark.parametrize("stage", [1, 3])
def test_groups_that_hold_a_copy_each_are_compared_too(run4, stage, how):
    for text in run4(edited, "values", how, stage, True):
        assert text.startswith("'1.weight': the ranks have written different values")


@contextmanager
def one_seed(step: int) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(step)
        yield


def the_same(of: str, how: str, stage: int) -> str:
    def edit(model: nn.Module, step: int) -> None:
        with one_seed(step):
            (VALUES if of == "values" else GRADIENTS)[how](model, step)

    return by_rank(edit, stage)


@pytest.mark.parametrize("how", sorted({*VALUES} - {"number", "row", "row of data", "at the end"}))
@pytest.mark.parametrize("stage", STAGES)
def test_the_same_value_on_all_ranks_is_taken(run2, stage, how):
    assert run2(the_same, "values", how, stage) == ["", ""]


@pytest.mark.parametrize("how", sorted({*GRADIENTS} - {"number"}))
@pytest.mark.parametrize("stage", STAGES)
def test_the_same_gradient_on_all_ranks_is_taken(run2, stage, how):
    assert run2(the_same, "gradients", how, stage) == ["", ""]


DRAWS = {
    "normal_": lambda p: p.normal_(),
    "uniform_": lambda p: p.data.uniform_(-1, 1),
    "kaiming": lambda p: nn.init.kaiming_uniform_(p),
    "trunc_normal": lambda p: nn.init.trunc_normal_(p),
}


def drawn(stage: int, how: str) -> tuple[str, torch.Tensor, torch.Tensor]:
    """The error if any, what a draw with the seed of a rank gave, and what the seed of rank 0 gives elsewhere."""
    torch.manual_seed(0)
    model = shardproof.shard(nn.Linear(FEATURES, FEATURES), stage)
    torch.manual_seed(7 + dist.get_rank())
    with torch.no_grad():
        DRAWS[how](model.weight)
    value = model.weight.detach().clone()
    torch.manual_seed(7)
    plain = nn.Parameter(torch.empty(FEATURES, FEATURES))
    with torch.no_grad():
        DRAWS[how](plain)
    return trained(model), value, plain.detach()


@pytest.mark.parametrize("how", DRAWS)
@pytest.mark.parametrize("stage", STAGES)
def test_an_operation_that_draws_takes_the_draw_of_rank_0(run2, stage, how):
    for text, value, expected in run2(drawn, stage, how):
        assert text == ""
        assert torch.equal(value, expected)


class Clamped(nn.Module):
    """One part clamps its scale in forward, as CLIP does, and only some ranks come to it."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.always, self.seldom = nn.Linear(FEATURES, FEATURES), Scaled(factor)

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        x = self.always(x)
        for _ in range(times):
            x = self.seldom(x)
        return x


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.project, self.factor = nn.Linear(FEATURES, FEATURES), factor
        self.scale = nn.Parameter(torch.full((FEATURES,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.mul_(self.factor).clamp_(0, 4.6)
        return self.project(x) * self.scale


def on_some_paths(stage: int, factor: float) -> str:
    torch.manual_seed(0)
    model = shardproof.shard(Clamped(factor), stage, units=[Scaled])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + dist.get_rank())
    try:
        for step in range(6):
            model(torch.randn(4, FEATURES), (step + dist.get_rank()) % 2).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except DesyncError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", STAGES)
def test_an_edit_in_a_forward_that_some_ranks_do_not_come_to(run2, stage):
    """The clamp changes nothing, however often it is done; a factor does."""
    assert run2(on_some_paths, stage, 1.0) == ["", ""]
    for text in run2(on_some_paths, stage, 0.5):
        assert text.startswith("'seldom.scale'")
        assert "different values" in text


def edited_again() -> None:
    """What the first use has saved is another value when the second has begun: torch refuses it without us, too."""
    model = shardproof.shard(Clamped(1.0), 0, units=[Scaled])
    loss = model(torch.randn(4, FEATURES), 2).sum()
    with pytest.raises(StaleWeightsError, match=r"'seldom\.scale' were changed between the forward pass"):
        loss.backward()


def test_an_edit_between_two_uses_in_one_forward_is_refused_at_once_where_ranks_hold_everything(run2):
    run2(edited_again)


def large(stage: int, per_rank: bool) -> str:
    """A digest of many values looks at some of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(2**12, 2**10), nn.Linear(2**10, FEATURES))
    model[0].weight.requires_grad_(False)
    model = shardproof.shard(model, stage)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    try:
        for _ in range(2):
            model(torch.tensor([1, 2])).pow(2).mean().backward()
            optimizer.step()
            with torch.no_grad():
                model[0].weight[5].fill_(float(dist.get_rank() if per_rank else 3))
    except DesyncError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 3])
def test_one_row_of_a_large_table(run2, stage):
    assert run2(large, stage, False) == ["", ""]
    for text in run2(large, stage, True):
        assert text.startswith("'0.weight': the ranks " + ("have written" if stage else "hold") + " different values")


def on_a_plateau(stage: int, average: bool) -> str:
    """Rank 0's loss goes down, the other's does not."""
    torch.manual_seed(0)
    model = shardproof.shard(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 2)), stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    try:
        for step in range(4):
            model(torch.randn(4, FEATURES)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = torch.tensor(float(dist.get_rank() or -step))
            if average:
                dist.all_reduce(loss)
            scheduler.step(loss)
    except DesyncError as error:
        return str(error)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    return ""


@pytest.mark.parametrize("stage", STAGES)
def test_a_learning_rate_that_each_rank_sets_by_its_own_loss_is_refused(run2, stage):
    assert run2(on_a_plateau, stage, True) == ["", ""]
    first, second = run2(on_a_plateau, stage, False)
    assert first.startswith("The ranks have stepped with different learning rates")
    assert "(AdamW, learning rate 0.01 on rank 0)" in first
    assert "(AdamW, learning rate 0.001 on rank 1)" in second


def two_optimizers(setting: str, value: float) -> str:
    """The first has on rank 1 what the second has on none; None of the rest is left out."""
    torch.manual_seed(0)
    model = shardproof.shard(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 2)), 3)
    optimizers = torch.optim.AdamW(model[0].parameters(), lr=1e-2), torch.optim.SGD(model[1].parameters(), lr=1e-3)
    optimizers[0].param_groups[0][setting] = value if value != value or dist.get_rank() else 0.5
    try:
        for _ in range(3):
            model(torch.ones(4, FEATURES)).pow(2).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    except DesyncError as error:
        return str(error)
    return ""


def test_the_optimizer_and_the_setting_that_differ_are_told(run2):
    first, second = run2(two_optimizers, "weight_decay", 0.25)
    assert "(AdamW, weight_decay 0.5 on rank 0)" in first
    assert "(AdamW, weight_decay 0.25 on rank 1)" in second


def test_a_rate_that_is_nan_on_all_ranks_is_none_that_differs(run2):
    assert run2(two_optimizers, "weight_decay", float("nan")) == ["", ""]
