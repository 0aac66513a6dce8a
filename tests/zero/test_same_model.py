"""Promise: ranks that shard different models are told so at once, all of them, with what differs."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardproof
from shardproof.errors import DesyncError
from zero.models import FEATURES, Net


def frozen_in_part(rank: int) -> nn.Module:
    model = Net()
    model.head.requires_grad_(rank == 0)
    return model


def with_a_table(rank: int) -> nn.Module:
    model = Net()
    model.register_buffer("table", torch.zeros(4 + rank))
    return model


KINDS: dict[str, tuple[Callable[[int], nn.Module], str, str]] = {
    "other shapes": (
        lambda rank: nn.Linear(4, 4 + rank),
        r"'weight' of shape \(4, 4\), torch.float32, trained, in the unit 'root'",
        r"'weight' of shape \(5, 4\), ",
    ),
    "as many elements": (lambda rank: nn.Linear(2 << rank, 8 >> rank, bias=False), r".*\(8, 2\), ", r".*\(4, 4\), "),
    "more blocks": (lambda rank: Net(depth=2 + rank), "'norm.weight' ", "'blocks.2.norm.weight' "),
    "other dtypes": (lambda rank: Net().to([torch.float32, torch.float64][rank]), ".*float32", ".*float64"),
    "frozen on one": (frozen_in_part, "'head.weight' .*trained", "'head.weight' .*frozen"),
    "other buffers": (with_a_table, r"the buffer 'table' of shape \(4,\), ", r"the buffer 'table' of shape \(5,\), "),
}
OPTIONS = {
    "units": (["blocks.*"], ["blocks.0"]),
    "mixed_precision": (None, torch.bfloat16),
    "deterministic": (False, True),
    "gradient_divide_factor": (None, 1.0),
}


def of_rank(kind: str, stage: int) -> str:
    with pytest.raises(DesyncError) as error:
        shardproof.shard(KINDS[kind][0](dist.get_rank()), stage)
    return str(error.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 3])
def test_models_that_differ(run2, kind, stage):
    _, first, other = KINDS[kind]
    for text in run2(of_rank, kind, stage):
        assert re.match(f"Ranks shard different models: rank 0 has {first}.*, and rank 1 has {other}", text), text


def with_option_of_rank(name: str) -> str:
    with pytest.raises(DesyncError) as error:
        shardproof.shard(Net(), 3, **{name: OPTIONS[name][dist.get_rank()]})
    return str(error.value)


@pytest.mark.parametrize("name", OPTIONS)
def test_arguments_that_differ(run2, name):
    for text in run2(with_option_of_rank, name):
        assert text.startswith("Ranks shard different models: rank 0 has ")
        assert name == "units" or f"{name}=" in text


def with_stage_of_rank() -> str:
    with pytest.raises(DesyncError) as error:
        shardproof.shard(Net(), 2 + dist.get_rank() // 3)
    return str(error.value)


def test_the_rank_that_differs_is_named(run4):
    assert set(run4(with_stage_of_rank)) == {
        "Ranks shard different models: rank 0 has stage=2, and rank 3 has stage=3. Build the same model on every rank, "
        "freeze the same parameters, and call shardproof.shard with the same arguments."
    }


def attached_on_each_rank() -> str:
    model = shardproof.shard(Net(), 3)
    model.adapter = nn.Linear(4, 4 + dist.get_rank())
    with pytest.raises(DesyncError) as error:
        model(torch.ones(2, FEATURES))
    return str(error.value)


def test_what_is_attached_later_is_compared_too(run2):
    for text in run2(attached_on_each_rank):
        assert "rank 1 has 'adapter.weight' of shape (5, 4)" in text
