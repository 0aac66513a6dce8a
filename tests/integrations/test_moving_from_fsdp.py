"""Promise: the page on moving from FSDP2 shows two scripts that do the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof

PAGE = Path(__file__).parents[2] / "docs" / "moving-from-fsdp.md"


def scripts() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)


def run_script(text: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a script, and the weights that it ends with."""
    chance = torch.Generator().manual_seed(torch.distributed.get_rank())
    batches = [tuple(torch.randn(4, 16, generator=chance) for _ in range(2)) for _ in range(4)]
    names: dict[str, Any] = {"batches": batches}
    exec(compile(text, str(PAGE), "exec"), names)
    return names["losses"], names["weights"]


def test_both_scripts_give_the_same_numbers(run2):
    theirs, ours = (run2(run_script, text) for text in scripts()[:2])
    for (losses, _), (wanted, _) in zip(ours, theirs, strict=True):
        assert losses == pytest.approx(wanted, abs=1e-6)
        assert losses[-1] != pytest.approx(losses[0], abs=1e-3)  # it trained
    weights, wanted = ours[0][1], theirs[0][1]
    assert weights.keys() == wanted.keys()
    for name, value in weights.items():
        assert torch.allclose(value, wanted[name], atol=1e-6), name


def state_of_an_optimizer(stage: int, full: bool) -> str:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model = shardproof.shard(torch.nn.Linear(4, 4), stage)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.state_dict()  # a rank's own is no error
    try:
        state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=full))
    except shardproof.EngineError as error:
        return str(error)
    return str(tuple(state["state"]["weight"]["exp_avg"].shape))


@pytest.mark.parametrize("stage, full", [(0, True), (1, True), (3, True), (3, False)])
def test_slices_of_state_are_not_taken_for_the_whole(run2, stage, full):
    for text in run2(state_of_an_optimizer, stage, full):
        assert "Use shardproof.save(model, optimizer, " in text if stage else text == "(4, 4)"


def saved_by_torch(path: str) -> str:
    import torch.distributed.checkpoint as dcp

    model = shardproof.shard(torch.nn.Linear(4, 4), 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{path}/weights")  # whole, so no error
    with pytest.raises(shardproof.EngineError) as caught:
        dcp.save({"optimizer": optimizer}, checkpoint_id=f"{path}/state")
    return str(caught.value)


def test_nor_where_torch_saves_an_optimizer(run2, tmp_path: Path):
    for text in run2(saved_by_torch, str(tmp_path)):
        assert "Use shardproof.save(model, optimizer, " in text


def saved_on_rank_0(stage: int, path: str) -> dict[str, torch.Tensor]:
    """As under DDP, between steps: rank 1 trains on."""
    torch.manual_seed(0)
    model = shardproof.shard(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)), stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = {}
    for step in range(4):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            weights = shardproof.full_state_dict(model, rank0_only=False)
            if torch.distributed.get_rank() == 0:
                torch.save(model.state_dict(), path)
    shardproof.barrier(model)
    torch.distributed.barrier()
    return {name: value - weights[name] for name, value in torch.load(path).items()}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_rank_0_may_save_weights_alone(run2, tmp_path: Path, stage: int):
    for apart in run2(saved_on_rank_0, stage, f"{tmp_path}/model.pt"):
        assert len(apart) == 4
        assert not any(value.any() for value in apart.values())
