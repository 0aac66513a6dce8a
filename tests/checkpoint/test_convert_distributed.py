"""What torch.distributed.checkpoint has written, in one process and without another engine, becomes ours."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict

import shardproof
from checkpoint.foreign import Small
from shardproof.checkpoint.convert import convert


def one_step() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    return model, optimizer, scheduler


def save_distributed(folder: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)


def test_values_beside_the_model_are_nested_as_they_were_saved(tmp_path: Path) -> None:
    """torch.distributed.checkpoint writes one entry for each leaf, and numbers that are keys as texts."""
    model, optimizer, scheduler = one_step()
    weights, state = get_state_dict(model, optimizer)
    extra = {"list": [1, 2], "a.b": {"t": torch.ones(2)}, "rows": [{"at": 1}, torch.zeros(1)], "odd": {"x": Small}}
    everything = {"model": weights, "optimizer": state, "scheduler": scheduler.state_dict(), "extra": extra, "n": 7}
    save_distributed(tmp_path / "there", everything)
    assert convert(tmp_path / "there", tmp_path / "ours")[1] == ["extra.odd.x"]
    again = shardproof.shard(torch.nn.Linear(4, 4), 0)
    other = torch.optim.AdamW(again.parameters(), lr=1e-2)
    goes_on = torch.optim.lr_scheduler.MultiStepLR(other, [1])
    values = shardproof.load(again, other, tmp_path / "ours", scheduler=goes_on)
    assert goes_on.state_dict() == scheduler.state_dict()
    assert values.keys() == {"extra", "n"}
    assert values["n"] == 7
    assert values["extra"].keys() == {"list", "a.b", "rows"}
    assert values["extra"]["list"] == [1, 2]
    assert values["extra"]["a.b"]["t"].tolist() == [1.0, 1.0]
    assert values["extra"]["rows"] == [{"at": 1}, torch.zeros(1)]


def test_steps_that_an_optimizer_of_others_counts_in_a_number(tmp_path: Path) -> None:
    """As DeepSpeed's FusedAdam and DeepSpeedCPUAdam do; torch's classes want a tensor, which they count up in place."""
    model, optimizer, _ = one_step()
    weights, state = get_state_dict(model, optimizer)
    state["state"] = {name: {**own, "step": int(own["step"])} for name, own in state["state"].items()}
    save_distributed(tmp_path / "there", {"model": weights, "optimizer": state})
    convert(tmp_path / "there", tmp_path / "ours")
    again = shardproof.shard(torch.nn.Linear(4, 4), 0)
    other = torch.optim.AdamW(again.parameters(), lr=1e-2)
    shardproof.load(again, other, tmp_path / "ours")
    for one, moves in ((model, optimizer), (again, other)):
        moves.zero_grad()
        one(torch.ones(2, 4)).sum().backward()
        moves.step()
    assert [int(own["step"]) for own in other.state.values()] == [2, 2]
    assert torch.equal(again.weight, model.weight)


def test_adam_without_its_bias_correction_is_refused(tmp_path: Path) -> None:
    """DeepSpeed's Adams can leave it out, and torch's cannot: their steps would be others."""
    model, optimizer, _ = one_step()
    for on in (True, False):
        optimizer.param_groups[0]["bias_correction"] = on
        weights, state = get_state_dict(model, optimizer)
        save_distributed(tmp_path / f"there-{on}", {"model": weights, "optimizer": state})
        convert(tmp_path / f"there-{on}", tmp_path / f"ours-{on}")
    again = shardproof.shard(torch.nn.Linear(4, 4), 0)
    other = torch.optim.AdamW(again.parameters(), lr=1e-2)
    with pytest.raises(shardproof.CheckpointError, match="without Adam's bias correction"):
        shardproof.load(again, other, tmp_path / "ours-False")
    shardproof.load(again, other, tmp_path / "ours-True")


def test_a_model_all_in_bf16_goes_on_with_masters_in_fp32(tmp_path: Path) -> None:
    """Its moments are in bf16, too: torch's step wants them in the dtype of the parameter."""
    model = torch.nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(2, 4).bfloat16()).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    save_distributed(tmp_path / "there", {"model": weights, "optimizer": state})
    convert(tmp_path / "there", tmp_path / "ours")
    again = shardproof.shard(torch.nn.Linear(4, 4), 0)
    other = torch.optim.AdamW(again.parameters(), lr=1e-2)
    shardproof.load(again, other, tmp_path / "ours")
    again(torch.ones(2, 4)).sum().backward()
    other.step()
    assert {value.dtype for own in other.state.values() for value in own.values()} == {torch.float32}


def test_a_bare_state_dict_is_refused(tmp_path: Path) -> None:
    """Names of a causal model begin with `model.`, all but that of its head, which was no weight then."""
    weights = {"model.norm.weight": torch.ones(3), "lm_head.weight": torch.ones(3, 3)}
    save_distributed(tmp_path / "there", weights)
    with pytest.raises(
        shardproof.CheckpointError, match=r"at the top level \('lm_head.weight' next to those under 'model"
    ):
        convert(tmp_path / "there", tmp_path / "ours")
    save_distributed(tmp_path / "other", {"model": weights})
    assert len(convert(tmp_path / "other", tmp_path / "ours")[0].parts) == 2


@pytest.mark.parametrize("names", [("step-10", "step-20"), ("pytorch_model_fsdp_0", "pytorch_model_fsdp_1")])
def test_a_folder_of_two_checkpoints_is_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    """Of names that both have the last one's values were taken, without a word."""
    for name in names:
        save_distributed(tmp_path / "there" / name, {"model": one_step()[0].state_dict()})
    said = f"there holds more than one checkpoint, .*: 'model.weight' is in {names[1]} and in another of {names[0]}"
    with pytest.raises(shardproof.CheckpointError, match=said):
        convert(tmp_path / "there", tmp_path / "ours")
    assert convert(tmp_path / "there" / names[0], tmp_path / "ours")[0].parts


@pytest.mark.parametrize("flat", [False, True])
def test_an_optimizer_that_was_saved_without_names_or_groups_is_refused(tmp_path: Path, flat: bool) -> None:
    """`optimizer.state_dict()` numbers its parameters; flatten_optimizer_state_dict forgets the groups."""
    model, optimizer, _ = one_step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options) if flat else optimizer.state_dict()
    save_distributed(tmp_path / "there", {"model": model.state_dict(), "optimizer": state})
    what = "groups of the optimizer" if flat else "saved without the names of its parameters"
    with pytest.raises(shardproof.CheckpointError, match=rf"{what}.*get_optimizer_state_dict\(model, optimizer\)"):
        convert(tmp_path / "there", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
