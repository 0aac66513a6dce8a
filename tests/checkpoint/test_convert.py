"""Checkpoints that DeepSpeed, FSDP2 and Accelerate have just written, on two ranks, become ours and go on as there."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardproof
from checkpoint.foreign import BATCH, Small, adamw, mean, rows
from shardproof.checkpoint.convert import convert

Run = Callable[..., list[Any]]
SCRIPT = Path(__file__).with_name("foreign.py")
INSIDE = {"fsdp2": "dcp", "accelerate": "state"}
DEEPSPEED = ("zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each engine left behind."""
    folder = tmp_path_factory.mktemp("foreign")
    there = importlib.util.find_spec("deepspeed") is not None
    kinds = [*INSIDE, *((*DEEPSPEED, "bf16") if there else ())]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), *kinds]
    jobs = []
    for rank in range(2):
        env = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        jobs.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        said = [job.communicate(timeout=600)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert (folder / kinds[-1] / "losses.json").exists(), "\n".join(said)
    return folder


def source_of(foreign: Path, kind: str) -> Path:
    if not (foreign / kind).exists():
        pytest.skip("DeepSpeed is not installed")
    return foreign / kind / INSIDE.get(kind, "")


def goes_on(path: str, stage: int) -> list[float]:
    """The losses of three steps after a checkpoint, by a model that began with zeros."""
    model = Small()
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.zero_()
    model = shardproof.shard(model, stage)
    optimizer = adamw(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    shardproof.load(model, optimizer, path)
    rank, world = 0, 1
    if torch.distributed.is_initialized():
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    losses = []
    for step in range(3, 6):
        x, y = rows(step, rank, world)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
    return losses


@pytest.mark.parametrize("kind", [*INSIDE, *DEEPSPEED])
def test_the_losses_are_those_of_the_engine_that_went_on(run2: Run, foreign: Path, tmp_path: Path, kind: str) -> None:
    """Masters, moments, steps, groups, tied and frozen weights, buffers: on one rank and on two, at two stages."""
    found, lost = convert(source_of(foreign, kind), tmp_path / "ours")
    assert not lost
    assert [len(group["params"]) for group in found.groups] == [6, 6]
    expected = pytest.approx(json.loads((foreign / kind / "losses.json").read_text()), abs=1e-6)
    assert goes_on(str(tmp_path / "ours"), 0) == expected
    for losses in run2(goes_on, str(tmp_path / "ours"), 3):
        assert losses == expected


def test_masters_of_a_model_in_bf16(foreign: Path, tmp_path: Path) -> None:
    """Rounded they are the weights that the model computes with, and there is more in them."""
    folder = source_of(foreign, "bf16")
    assert not convert(folder, tmp_path / "ours")[1]
    model = shardproof.shard(Small(), 0)
    optimizer = adamw(model)
    values = shardproof.load(model, optimizer, tmp_path / "ours")
    assert (values["step"], values["epoch"]) == (3, 4)
    weights = torch.load(folder / "global_step3" / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    masters = shardproof.full_state_dict(model)
    assert masters.keys() == weights.keys()
    assert all(torch.equal(masters[name].bfloat16(), weights[name]) for name in weights)
    assert not torch.equal(masters["head.weight"], weights["head.weight"].float())
    assert all(int(state["step"]) == 3 and bool(state["exp_avg"].any()) for state in optimizer.state.values())


def under_our_names(folder: str, stage: int) -> tuple[list[float], Any, int]:
    """The same with DeepSpeed's API on our engine: losses, client state, steps."""
    from shardproof.integrations import deepspeed

    model = Small()
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.zero_()
    world = torch.distributed.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": BATCH // world,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
    _, state = engine.load_checkpoint(folder, tag="global_step3")
    losses = []
    for step in range(3, 6):
        x, y = rows(step, torch.distributed.get_rank(), world)
        loss = F.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(mean(loss))
    return losses, state, engine.global_steps


def test_a_script_with_deepspeeds_names_goes_on(run2: Run, foreign: Path, tmp_path: Path) -> None:
    """Its load_checkpoint finds what was converted: the losses, the client state and the counters."""
    convert(source_of(foreign, "zero2"), tmp_path / "global_step3")
    expected = pytest.approx(json.loads((foreign / "zero2" / "losses.json").read_text()), abs=1e-6)
    for losses, state, steps in run2(under_our_names, str(tmp_path), 3):
        assert losses == expected
        assert state == {"epoch": 4}
        assert steps == 6


def test_the_command_says_what_it_found(foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the folder of a checkpoint of transformers' Trainer, whose state and scheduler come along."""
    from shardproof.cli.main import main

    there = shutil.copytree(source_of(foreign, "fsdp2"), tmp_path / "checkpoint-3" / "pytorch_model_fsdp_0").parent
    (there / "trainer_state.json").write_text('{"global_step": 3}')
    torch.save({"last_epoch": 3}, there / "scheduler.pt")
    assert main(["convert", str(there), str(tmp_path / "ours")]) == 0
    said = capsys.readouterr().out
    assert "18 tensors" in said
    assert "2 group(s), exp_avg, exp_avg_sq" in said
    assert (tmp_path / "ours" / "trainer_state.json").is_file()
    model = shardproof.shard(Small(), 0)
    values = shardproof.load(model, None, tmp_path / "ours")
    assert values["scheduler"] == {"last_epoch": 3}
    assert values["progress"]["last_logged"] == 3
    assert main(["convert", str(there), str(tmp_path / "ours")]) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_a_deepspeed_checkpoint_that_lacks_a_rank_is_refused(foreign: Path, tmp_path: Path, kind: str) -> None:
    """And nothing is left behind."""
    there = shutil.copytree(source_of(foreign, kind), tmp_path / "there")
    next(there.glob("*/zero_pp_rank_1_*_optim_states.pt")).unlink()
    with pytest.raises(shardproof.CheckpointError, match="was written by 2 ranks, and there are files of 1"):
        convert(there, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_damaged_file_is_refused_by_name(foreign: Path, tmp_path: Path) -> None:
    there = shutil.copytree(source_of(foreign, "fsdp2"), tmp_path / "there")
    os.truncate(there / "__1_0.distcp", 100)
    with pytest.raises(shardproof.CheckpointError, match="there cannot be read"):
        convert(there, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("name", ["scheduler.pt", "trainer_state.json"])
def test_a_damaged_file_of_a_trainer_is_refused_by_name(foreign: Path, tmp_path: Path, name: str) -> None:
    there = shutil.copytree(source_of(foreign, "fsdp2"), tmp_path / "there")
    (there / name).write_bytes(b"{ cut of")
    with pytest.raises(shardproof.CheckpointError, match=f"{name} cannot be read"):
        convert(there, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(shardproof.CheckpointError, match=r"empty holds no checkpoint that can be converted.*DeepSpeed"):
        convert(tmp_path / "empty", tmp_path / "ours")
    with pytest.raises(shardproof.CheckpointError, match="nothing does not exist"):
        convert(tmp_path / "nothing", tmp_path / "ours")
