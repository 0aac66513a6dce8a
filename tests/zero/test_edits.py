"""One rank computes on its own while the others edit weights already: each value is that of one process."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardproof
from shardproof.errors import DesyncError
from shardproof.zero.schedule.edits import Edits

FEATURES, STEPS = 8, 4
Validate = Callable[[], None]


class Clamped(nn.Module):
    """It clamps its scale in each forward, as CLIP does. Nothing has to be clamped, and `zero` has no bit set."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.scale = nn.Parameter(torch.full((FEATURES,), 3.0))
        self.zero = nn.Parameter(torch.zeros(FEATURES), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.clamp_(0, 4.6)
            self.zero.clamp_(-1, 1)
        return self.second(self.first(x) * self.scale) + self.zero


def clip(model: nn.Module, validate: Validate) -> None:
    validate()
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.2, 2.9)


def swap(model: nn.Module, validate: Validate) -> None:
    """To other weights (an average of the steps), and back."""
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.copy_(torch.full(p.shape, 0.5))
    validate()
    for p, value in zip(model.parameters(), before, strict=True):
        p.data.copy_(value)


def decay(model: nn.Module, validate: Validate) -> None:
    validate()
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.9)


def twice(model: nn.Module, validate: Validate) -> None:
    clip(model, validate)
    decay(model, validate)


EDITS = {"clip": clip, "swap": swap, "decay": decay, "twice": twice}


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(model: nn.Module, ranks: list[int], edit: str, by_hand: bool, late: bool) -> list[torch.Tensor]:
    """What rank 0 found in its validations, and the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found: list[torch.Tensor] = []

    def validate() -> None:
        if 0 not in ranks:
            return
        if late:
            time.sleep(0.1)  # long enough for the other rank to be in the next forward, if nothing keeps it
        with torch.no_grad():
            found.append(model(batch(99, 0)))

    for step in range(STEPS):
        for rank in ranks:
            (model(batch(step, rank)).pow(2).mean() / len(ranks)).backward()
        if by_hand:
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=1e-2)
        else:
            optimizer.step()
        EDITS[edit](model, validate)
        optimizer.zero_grad()
    whole = shardproof.full_state_dict(model, rank0_only=False) if late else model.state_dict()
    return [*found, *whole.values()]


def on_ranks(stage: int, edit: str, by_hand: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = shardproof.shard(Clamped(), stage, units=[nn.Linear])
    return trained(model, [dist.get_rank()], edit, by_hand, True)


@pytest.mark.sampled
@pytest.mark.parametrize("by_hand", [False, True], ids=["optimizer", "by hand"])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_that_validates_alone_before_an_edit(run2, stage: int, edit: str, by_hand: bool) -> None:
    torch.manual_seed(0)
    expected = trained(Clamped(), [0, 1], edit, by_hand, False)
    first, second = run2(on_ranks, stage, edit, by_hand)
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(second, expected[-len(second) :], rtol=1e-5, atol=1e-6)


def meetings(stage: int) -> list[int]:
    """How often ranks have met after each of three rows of edits, and after those that follow a step."""
    model = shardproof.shard(Clamped(), stage, units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    counts = []
    with mock.patch.object(Edits, "meet", autospec=True, side_effect=Edits.meet) as meet:
        for row in range(4):
            if row == 3:
                model(batch(0, 0)).sum().backward()
                optimizer.step()
            clip(model, lambda: None)
            counts.append(meet.call_count)
    return counts


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_meet_once_for_edits_of_many_parameters_in_a_row(run2, stage: int) -> None:
    assert run2(meetings, stage) == [[1, 2, 3, 4]] * 2


class Odd(Clamped):
    """It clamps what it does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.tensor([float("nan"), 0.0, -0.0]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.odd.clamp_(-0.0, 1)
        return super().forward(x)


def in_half(stage: int) -> str:
    """The error if any of a run in bf16 in which rank 0 alone comes to a forward that clamps NaN and -0.0."""
    torch.manual_seed(0)
    model = shardproof.shard(Odd(), stage, mixed_precision=torch.bfloat16)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    try:
        for step in range(3):
            model(batch(step, dist.get_rank())).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                model(batch(99, 0))
        shardproof.full_state_dict(model)
    except DesyncError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nan_and_minus_nought_are_no_difference(run2, stage: int) -> None:
    assert run2(in_half, stage) == ["", ""]


def refused(stage: int, how: str) -> str:
    torch.manual_seed(0)
    model = shardproof.shard(nn.Linear(1, 1), stage)
    optimizer, one = torch.optim.SGD(model.parameters(), lr=1e-2), 1 + dist.get_rank()
    try:
        F.mse_loss(model(torch.ones(4, 1)), torch.zeros(4, 1)).backward()
        with torch.no_grad():
            if how == "numpy":
                model.bias.mul_(np.float32(one))
            elif how == "assigned":
                model.bias.grad = torch.tensor([float(one)])
            else:
                model.bias.grad.fill_(torch.tensor(float(one)))
        optimizer.step()
        shardproof.full_state_dict(model)
    except DesyncError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["numpy", "assigned", "filled"])
@pytest.mark.parametrize("stage", [0, 2])
def test_numbers_of_other_kinds_that_differ_are_refused(run2, stage: int, how: str) -> None:
    for text in run2(refused, stage, how):
        assert "'bias': the ranks have written different values" in text


def alone(stage: int) -> str:
    model = shardproof.shard(nn.Linear(FEATURES, FEATURES), stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    try:
        if dist.get_rank() == 0:
            with torch.no_grad():
                model.bias.fill_(1.0)
        model(batch(0, dist.get_rank())).pow(2).mean().backward()
        optimizer.step()
    except DesyncError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [1, 3])
def test_an_edit_on_one_rank_is_refused_with_its_name(run2, stage: int) -> None:
    for text in run2(alone, stage):
        assert text.startswith("'bias': edited or loaded on some ranks only (under `if rank == 0`?)")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def entries_of_tied(stage: int | None, folder: str) -> list[torch.Tensor]:
    """What a file holds of them, and values after edits through either entry and after one that was taken anew."""
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(0)
    model = Tied() if stage is None else shardproof.shard(Tied(), stage)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    file = f"{folder}/{dist.get_rank() if dist.is_initialized() else 'one'}.safetensors"
    safetensors.save_model(model, file)
    found = [torch.tensor(len(safetensors.load_file(file)))]
    entries = model.state_dict()
    entries["embed.weight"][0].zero_()
    found.append(entries["head.weight"].clone())
    entries["head.weight"][1].fill_(2)
    found.append(model.head.weight.detach().clone())
    model(torch.arange(6)).sum().backward()
    optimizer.step()
    again = model.state_dict()
    again["head.weight"][2].fill_(3)
    found += [again["embed.weight"].clone(), model.embed.weight.detach().clone()]
    with torch.no_grad():
        model.head.weight.mul_(1)  # changes nothing, but is an edit
    model.state_dict()["embed.weight"][3].fill_(4)
    return [*found, model.head.weight.detach().clone()]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_entries_of_a_tied_parameter_share_memory(run2, tmp_path, stage):
    wanted = entries_of_tied(None, str(tmp_path))
    for found in run2(entries_of_tied, stage, str(tmp_path)):
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want)


def average_of_more(stage: int | None, by_list: bool) -> list[torch.Tensor]:
    """An average that does not train, of a model of which a part does: their parameters lie in different places."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    average = copy.deepcopy(model).requires_grad_(False)
    if stage is not None:
        shardproof.shard(model, stage)
        shardproof.shard(average, stage)
    for _ in range(2):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
            if by_list:
                torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.25)
            else:
                for old, new in zip(average.parameters(), model.parameters(), strict=True):
                    old.lerp_(new, 0.25)
    return [value.clone() for value in average.state_dict().values()]


@pytest.mark.parametrize("by_list", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_average_of_a_model_that_is_frozen_in_part(run4, stage, by_list):
    wanted = average_of_more(None, by_list)
    for found in run4(average_of_more, stage, by_list):
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want)


def lent_behind_an_edit(held: bool) -> list[list[float]]:
    """All ranks edit through a view, and one alone computes: with what the others lend."""
    torch.manual_seed(0)
    model = shardproof.shard(Clamped(), 3, units=[nn.Linear], inference_memory=0)
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    views = [weight.data.view(-1) for weight in weights]
    if not held:
        views.clear()
    for i, weight in enumerate(weights):
        (views[i] if held else weight.data.view(-1)).fill_(0.1)
    found = []
    for _ in range(3 if dist.get_rank() == 0 else 0):
        with torch.no_grad():
            found.append(model(batch(99, 0)).sum(1).tolist())
    shardproof.barrier(model)
    values = shardproof.full_state_dict(model, rank0_only=False)
    plain = Clamped()
    plain.load_state_dict(values)
    return [*found, plain(batch(99, 0)).sum(1).tolist()]


@pytest.mark.parametrize("held", [False, True])
def test_what_is_lent_has_what_was_written_through_views(run2, held):
    alone, _ = run2(lent_behind_an_edit, held)
    for found in alone:
        assert found == pytest.approx(alone[-1])
