"""Checkpoints that DeepSpeed, FSDP2 and Accelerate have just written, on two ranks, become ours and go on as there."""

from __future__ import annotations

import errno
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
from checkpoint.test_convert_distributed import one_step, save_distributed
from shardproof.checkpoint.convert import convert

Run = Callable[..., list[Any]]
SCRIPT = Path(__file__).with_name("foreign.py")
INSIDE = {"fsdp2": "dcp", "accelerate": "state"}
DEEPSPEED = ("zero1", "zero2", "zero3", "robin1", "robin2", "pieces")
THIN = ("thin1", "thin2", "thin3")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each engine left behind."""
    folder = tmp_path_factory.mktemp("foreign")
    there = importlib.util.find_spec("deepspeed") is not None
    kinds = [*INSIDE, *((*DEEPSPEED, *THIN, "bf16") if there else ())]
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


def goes_on(path: str, stage: int, frozen: bool = True) -> list[float]:
    """The losses of three steps after a checkpoint, by a model that began with zeros (without `frozen`: in what is
    trained)."""
    model = Small()
    with torch.no_grad():
        for value in (*(p for p in model.parameters() if frozen or p.requires_grad), *model.buffers()):
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


@pytest.mark.parametrize("kind", THIN)
def test_frozen_parameters_that_were_left_out_are_those_of_the_model(
    run2: Run, foreign: Path, tmp_path: Path, kind: str
) -> None:
    """DeepSpeed's exclude_frozen_parameters, with which transformers' Trainer saves adapters."""
    convert(source_of(foreign, kind), tmp_path / "ours")
    expected = pytest.approx(json.loads((foreign / kind / "losses.json").read_text()), abs=1e-6)
    assert goes_on(str(tmp_path / "ours"), 0, False) == expected
    for losses in run2(goes_on, str(tmp_path / "ours"), 3, False):
        assert losses == expected
    other = Small()
    other.blocks[1].requires_grad_(True)
    with pytest.raises(shardproof.CheckpointError, match=r"4 missing in it: blocks\.1\.0\.weight"):
        shardproof.load(shardproof.shard(other, 0), None, tmp_path / "ours")


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_frozen_parameters_that_were_not_left_out_have_to_be_there(foreign: Path, tmp_path: Path, kind: str) -> None:
    convert(source_of(foreign, kind), tmp_path / "ours")
    other = Small()
    other.more = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(shardproof.CheckpointError, match=r"2 missing in it: more\.weight"):
        shardproof.load(shardproof.shard(other, 0), None, tmp_path / "ours")


@pytest.mark.parametrize("kind", ["zero1", "zero2", "bf16"])
def test_masters_that_are_not_the_models_weights_are_refused(foreign: Path, tmp_path: Path, kind: str) -> None:
    """Whatever the reason: a file of another step, or a layout that is not known."""
    there = shutil.copytree(source_of(foreign, kind), tmp_path / "there")
    file = there / "global_step3" / "mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    state["module"]["head.weight"] = state["module"]["head.weight"].flip(0)
    torch.save(state, file)
    with pytest.raises(shardproof.CheckpointError, match=r"head\.weight"):
        convert(there, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_masters_that_lie_elsewhere_are_refused(foreign: Path, tmp_path: Path) -> None:
    """As where DeepSpeed keeps them on NVMe."""
    there = shutil.copytree(source_of(foreign, "pieces"), tmp_path / "there")
    file = next(there.glob("*/zero_pp_rank_1_*_optim_states.pt"))
    state = torch.load(file, weights_only=False)
    state["optimizer_state_dict"]["fp32_flat_groups"][1] = torch.empty(0)
    torch.save(state, file)
    with pytest.raises(shardproof.CheckpointError, match="NVMe"):
        convert(there, tmp_path / "ours")


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


def edited(file: Path, change: Callable[[Any], Any]) -> None:
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)


def test_client_state_under_our_names_is_the_users(run2: Run, foreign: Path, tmp_path: Path) -> None:
    """`client_state={"step": step}` is how DeepSpeed's tutorial saves; a number of its own was given instead."""
    there = shutil.copytree(source_of(foreign, "zero2"), tmp_path / "there")
    theirs = {"step": 1234, "scheduler": "mine", "odd": Small}
    edited(there / "global_step3" / "mp_rank_00_model_states.pt", lambda state: state.update(theirs))
    assert convert(there, tmp_path / "global_step3")[1] == ["odd"]
    for _, state, steps in run2(under_our_names, str(tmp_path), 3):
        assert state == {"epoch": 4, "step": 1234, "scheduler": "mine"}
        assert steps == 6
    values = shardproof.load(shardproof.shard(Small(), 0), None, tmp_path / "global_step3")
    assert (values["step"], values["client_state"]["step"]) == (3, 1234)


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_names_of_a_compiled_model_are_those_of_the_model(foreign: Path, tmp_path: Path, kind: str) -> None:
    there = shutil.copytree(source_of(foreign, kind), tmp_path / "there")
    before = "_orig_mod.{}".format

    def compiled(state: Any) -> None:
        for key in ("module", "shared_params", "frozen_param_shapes", "frozen_param_fragments"):
            state[key] = {before(name): value for name, value in state[key].items()}
        state["param_shapes"] = [{before(name): shape for name, shape in g.items()} for g in state["param_shapes"]]
        state["buffer_names"] = [before(name) for name in state["buffer_names"]]

    for file in there.glob("*/*_model_states.pt"):
        edited(file, compiled)
    convert(there, tmp_path / "ours")
    expected = json.loads((foreign / kind / "losses.json").read_text())
    assert goes_on(str(tmp_path / "ours"), 0) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("what", ["optim", "model"])
def test_files_of_ranks_that_are_of_two_steps_are_refused(foreign: Path, tmp_path: Path, what: str) -> None:
    """At stage 3 nothing else tells: each rank has its own part of the masters."""
    there = shutil.copytree(source_of(foreign, "zero3"), tmp_path / "there")

    def later(state: Any) -> None:
        if what == "model":
            state["global_steps"] += 1
        else:
            for own in state["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
                own["step"] += 1

    edited(next(there.glob(f"*/zero_pp_rank_1_*_{what}_states.pt")), later)
    with pytest.raises(shardproof.CheckpointError, match=f"the {what}[a-z]* states of rank 1 are from another step"):
        convert(there, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


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
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_a_deepspeed_checkpoint_that_lacks_a_rank_is_refused(foreign: Path, tmp_path: Path, kind: str) -> None:
    """And nothing is left behind."""
    there = shutil.copytree(source_of(foreign, kind), tmp_path / "there")
    next(there.glob("*/zero_pp_rank_1_*_optim_states.pt")).unlink()
    with pytest.raises(shardproof.CheckpointError, match="was written by 2 ranks, but has files of only 1"):
        convert(there, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_damaged_file_is_refused_by_name(foreign: Path, tmp_path: Path) -> None:
    there = shutil.copytree(source_of(foreign, "fsdp2"), tmp_path / "there")
    os.truncate(there / "__1_0.distcp", 100)
    with pytest.raises(shardproof.CheckpointError, match="there cannot be read"):
        convert(there, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_damage_that_is_another_error_of_pickle_is_refused_by_name_too(foreign: Path, tmp_path: Path) -> None:
    """What a damaged pickle raises is anything: here a name with a byte that is no text."""
    there = shutil.copytree(source_of(foreign, "fsdp2"), tmp_path / "there")
    metadata = (there / ".metadata").read_bytes()
    assert b"embed.bias" in metadata
    (there / ".metadata").write_bytes(metadata.replace(b"embed.bias", b"\xffmbed.bias"))
    with pytest.raises(shardproof.CheckpointError, match="there cannot be read: UnicodeDecodeError"):
        convert(there, tmp_path / "ours")
    (tmp_path / "zero").mkdir()
    torch.save({"optimizer_state_dict": {}}, tmp_path / "zero" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    file = tmp_path / "zero" / "mp_rank_00_model_states.pt"
    torch.save(torch.nn.Linear(2, 2), file)
    file.write_bytes(file.read_bytes().replace(b"in_features", b"\xffn_features"))
    with pytest.raises(shardproof.CheckpointError, match=r"model_states.pt cannot be read: UnicodeDecodeError"):
        convert(tmp_path / "zero", tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there", "zero"]


@pytest.mark.parametrize("lacks", ["optimizer_0", "pytorch_model_fsdp_0"])
def test_a_state_of_accelerate_that_is_not_complete_is_refused(foreign: Path, tmp_path: Path, lacks: str) -> None:
    """`.metadata` is written last: without it nothing tells what is in the other files. The optimizer began anew."""
    there = shutil.copytree(source_of(foreign, "accelerate"), tmp_path / "there")
    (there / lacks / ".metadata").unlink()
    with pytest.raises(shardproof.CheckpointError, match=rf"{lacks} is incomplete: .metadata, which is written last"):
        convert(there, tmp_path / "ours")
    with pytest.raises(shardproof.CheckpointError, match=rf"{lacks} is incomplete: .metadata, which is written last"):
        convert(there / lacks, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_deepspeed_checkpoint_that_lacks_model_states_is_refused(tmp_path: Path) -> None:
    """At ZeRO-3 each rank writes a file of them, with its part of what is frozen."""
    for rank in range(3):
        state = {"zero_stage": 3, "partition_count": 3, "fp32_flat_groups": []}
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": state}, tmp_path / f"{name}_optim_states.pt")
        if rank != 1:
            torch.save({"param_shapes": []}, tmp_path / f"{name}_model_states.pt")
    with pytest.raises(shardproof.CheckpointError, match="written by 3 ranks, but has model states of only 2"):
        convert(tmp_path, tmp_path / "ours")


def test_what_latest_names_has_to_be_there(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step500")
    with pytest.raises(shardproof.CheckpointError, match="latest names global_step500, which does not exist"):
        convert(tmp_path, tmp_path / "ours")
    (tmp_path / "latest").write_bytes(b"\xff\xfe")
    with pytest.raises(shardproof.CheckpointError, match="latest cannot be read"):
        convert(tmp_path, tmp_path / "ours")


def test_a_deepspeed_checkpoint_without_what_is_looked_for_names_it(tmp_path: Path) -> None:
    """Another release wrote it."""
    state = {"zero_stage": 3, "partition_count": 1, "fp32_flat_groups": []}
    torch.save({"optimizer_state_dict": state}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    torch.save({"module": {}}, tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    with pytest.raises(shardproof.CheckpointError, match=r"lacks 'param_shapes', .*DeepSpeed 0.19 writes"):
        convert(tmp_path, tmp_path / "ours")


@pytest.mark.parametrize("name", ["scheduler.pt", "trainer_state.json"])
def test_a_damaged_file_of_a_trainer_is_refused_by_name(foreign: Path, tmp_path: Path, name: str) -> None:
    there = shutil.copytree(source_of(foreign, "fsdp2"), tmp_path / "there")
    (there / name).write_bytes(b"{ cut of")
    with pytest.raises(shardproof.CheckpointError, match=f"{name} cannot be read"):
        convert(there, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_place_that_cannot_be_written_to_is_told_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardproof.cli.main import main

    model, _, _ = one_step()
    save_distributed(tmp_path / "there", {"model": model.state_dict()})
    (tmp_path / "file").touch()
    assert main(["convert", str(tmp_path / "there"), str(tmp_path / "file" / "ours")]) == 2
    assert "file: File exists" in capsys.readouterr().err

    def read_only(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))

    monkeypatch.setattr("tempfile.mkdtemp", read_only)
    assert main(["convert", str(tmp_path / "there"), str(tmp_path / "ours")]) == 2
    said = capsys.readouterr().err
    assert "Read-only file system" in said
    assert "Errno" not in said
    assert not (tmp_path / "ours").exists()


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(shardproof.CheckpointError, match=r"empty holds no checkpoint that can be converted.*DeepSpeed"):
        convert(tmp_path / "empty", tmp_path / "ours")
    with pytest.raises(shardproof.CheckpointError, match="nothing does not exist"):
        convert(tmp_path / "nothing", tmp_path / "ours")
    (tmp_path / "zero0").mkdir()
    torch.save({"module": {}, "param_shapes": None}, tmp_path / "zero0" / "mp_rank_00_model_states.pt")
    with pytest.raises(shardproof.CheckpointError, match="zero0 was not written by ZeRO"):
        convert(tmp_path / "zero0", tmp_path / "ours")
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(shardproof.CheckpointError, match=r"model.pt is a file\. Supported are folders"):
        convert(tmp_path / "model.pt", tmp_path / "ours")
