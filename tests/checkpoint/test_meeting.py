"""A rank that comes to a checkpoint early lends its slices to those that still compute; saving on one rank is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardproof
from distributed.pool import RemoteError
from shardproof.errors import DesyncError
from shardproof.integrations.weights import places_of_entries, stream_weights
from zero.models import FEATURES, Net


def begin() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after one step, of which rank 0 has run one more forward pass than the other."""
    torch.manual_seed(0)
    model = shardproof.shard(Net(), 3, inference_memory=0, desync_timeout=5.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, FEATURES)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def look(model: nn.Module) -> None:
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(torch.ones(1, FEATURES))


def checkpoint(folder: str) -> list[float]:
    model, optimizer = begin()
    look(model)
    shardproof.save(model, optimizer, Path(folder) / "state", asynchronous=False)
    look(model)
    shardproof.load(model, optimizer, Path(folder) / "state")
    return [float(value.sum()) for value in shardproof.full_state_dict(model, rank0_only=False).values()]


def weights(folder: str) -> list[float]:
    from safetensors.torch import load_file

    model, _ = begin()
    look(model)
    assert stream_weights(model, Path(folder), find=places_of_entries)
    found = load_file(Path(folder) / "model.safetensors")
    return [float(found[name].sum()) for name in model.state_dict()]


@pytest.mark.parametrize("what", [checkpoint, weights])
def test_it_may_be_asked_for_while_another_rank_computes(run2: Any, tmp_path: Path, what: Any) -> None:
    first, second = run2(what, str(tmp_path), timeout=60)
    assert first == second


def on_one_rank(folder: str) -> None:
    model, optimizer = begin()
    if dist.get_rank() == 0:
        shardproof.save(model, optimizer, Path(folder) / "state")
    model(torch.ones(2, FEATURES)).sum().backward()
    optimizer.step()


def test_on_one_rank_only_it_is_told(run2: Any, tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="rank 0 wants to collect the state dict"):
        run2(on_one_rank, str(tmp_path), timeout=60)


def edited_apart(stage: int, folder: str) -> str:
    model = shardproof.shard(nn.Linear(1, 1), stage)
    with torch.no_grad():
        model.bias.add_(torch.tensor(float(dist.get_rank())))
    try:
        shardproof.save(model, None, Path(folder) / "state", asynchronous=False)
    except DesyncError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 3])
def test_what_ranks_have_written_differently_is_no_checkpoint(run2: Any, tmp_path: Path, stage: int) -> None:
    for text in run2(edited_apart, stage, str(tmp_path)):
        assert "'bias': the ranks have written different values" in text
    assert not list(tmp_path.iterdir())


def loads_its_own(folder: str, *names: str) -> str:
    model = shardproof.shard(nn.Linear(1, 1), 3)
    for name in ("first", "second"):
        shardproof.save(model, None, Path(folder) / name, asynchronous=False)
    with pytest.raises(shardproof.CheckpointError) as refused:
        shardproof.load(model, None, Path(folder) / names[dist.get_rank()])
    return str(refused.value)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("first", "second"), "Rank 0 loads {0}/first, and rank 1 {0}/second. Name the same"),
        (("first", "none"), "{0}/none is not a complete checkpoint: there is no such folder."),
        (("none", "first"), "{0}/none is not a complete checkpoint: there is no such folder."),
    ],
)
def test_ranks_that_name_different_checkpoints_are_told(run2: Any, tmp_path: Path, names: Any, told: str) -> None:
    for text in run2(loads_its_own, str(tmp_path), *names):
        assert text.startswith(told.format(tmp_path))
