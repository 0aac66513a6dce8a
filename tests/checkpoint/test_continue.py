"""Continuing from a checkpoint is the uninterrupted run: bit for bit on as many ranks, to 1e-6 on others."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import shardproof
from checkpoint.runs import (
    BF16,
    FILES,
    FP16,
    HOST,
    OPTIMIZERS,
    Job,
    Mixed,
    after,
    before_and_after,
    check_equal,
    leg,
)
from shardproof.checkpoint import api, parts, storage
from shardproof.checkpoint.manifest import Manifest

Run = Callable[..., list[Any]]

KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "adamw": ("mixed", "adamw", {}),
    "random numbers": ("noisy", "adamw", {}),
    "momentum": ("mixed", "momentum", {}),
    "fused": ("mixed", "fused", {}),
    "adafactor": ("mixed", "adafactor", {}),
    "mixed precision": ("mixed", "adamw", BF16),
    "lora": ("lora", "adamw", {}),
    "muon": ("mixed", "muon", {}),
    "muon and adamw": ("mixed", "muon and adamw", {}),
    "fp16": ("mixed", "adamw", FP16),
    "files": ("mixed", "adamw", FILES),
    "host": ("mixed", "adamw", HOST),
    "modes": ("mixed", "modes", {}),
}
# Where numbers are rounded to 11 or 8 bits on the way, the order of additions over ranks shows.
TOLERANCE = {"fp16": 1e-3, "muon": 1e-4, "muon and adamw": 1e-4}


def there_and_back(kind: str, stage: int, path: str) -> tuple[Any, Any]:
    return before_and_after(stage, *KINDS[kind], path), after(stage, *KINDS[kind], path)


ALL = [(kind, stage) for kind in KINDS for stage in range(4)]
FEW = [(kind, stage) for kind, stage in ALL if kind == "adamw" or stage == 3 or (kind, stage) == ("lora", 0)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "stage"), [pytest.param(*case, marks=() if case in FEW else pytest.mark.slow) for case in ALL]
)
def test_on_as_many_ranks_bit_for_bit(run2: Run, tmp_path: Path, kind: str, stage: int) -> None:
    """Weights, buffers and random numbers go on where they were; training while it is written changes nothing."""
    for whole, continued in run2(there_and_back, kind, stage, str(tmp_path / "saved")):
        check_equal(continued, whole, 0.0)


@pytest.mark.parametrize("kind", ["adamw", "random numbers", "mixed precision"])
def test_alone_bit_for_bit(tmp_path: Path, kind: str) -> None:
    """One process without a process group saves and loads too."""
    whole, continued = there_and_back(kind, 3, str(tmp_path / "saved"))
    check_equal(continued, whole, 0.0)


def in_little_pieces(path: str) -> tuple[Any, Any]:
    with mock.patch.object(parts, "CHUNK", 4), mock.patch.object(storage, "READ", 64):
        return there_and_back("adamw", 3, path)


def test_a_tensor_of_many_pieces(run2: Run, tmp_path: Path) -> None:
    """As a large one is written, read back and loaded; alone, it is read whole from the pieces of two ranks."""
    path = str(tmp_path / "saved")
    for whole, continued in run2(in_little_pieces, path):
        check_equal(continued, whole, 0.0)
    check_equal(after(0, *KINDS["adamw"], path), whole, 1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "kind", ["adamw", "momentum", "lora", "adafactor", "muon", "muon and adamw", "fp16", "files", "host"]
)
def test_from_two_ranks_to_one_and_back(run2: Run, tmp_path: Path, kind: str) -> None:
    """Saved in pieces and loaded whole, and the other way round."""
    pieces, whole = str(tmp_path / "pieces"), str(tmp_path / "whole")
    expected = run2(before_and_after, 3, *KINDS[kind], pieces)[0]
    tolerance = TOLERANCE.get(kind, 1e-6)
    check_equal(after(0, *KINDS[kind], pieces), expected, tolerance)
    before_and_after(0, *KINDS[kind], whole)
    for got in run2(after, 3, *KINDS[kind], whole):
        check_equal(got, expected, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "lora", "adafactor", "muon", "fp16", "files", "host"])
def test_a_run_that_moves_on_and_on(run: Run, tmp_path: Path, kind: str) -> None:
    """From each number of ranks and stage to the next, with a checkpoint each time, and back to the first."""
    places = [(2, 3), (3, 2), (4, 3), (1, 0), (3, 1), (2, 0), (4, 2), (2, 3)]
    steps = 2 * len(places)
    expected = run(2, leg, 3, *KINDS[kind], None, str(tmp_path / "whole"), steps)[0]
    losses, begin, weights = [], None, {}
    for number, (world, stage) in enumerate(places):
        end = str(tmp_path / str(number))
        ranks = run(world, leg, stage, *KINDS[kind], begin, end, 2)
        losses += ranks[0][0]
        begin, weights = end, ranks[0][1]
    check_equal((losses, weights), expected, TOLERANCE.get(kind, 2e-6))
    assert torch.equal(weights["scale of the loss"], expected[1]["scale of the loss"])


@pytest.mark.parametrize("kind", ["files", pytest.param("host", marks=pytest.mark.slow)])
def test_offload_is_no_part_of_a_checkpoint(run2: Run, tmp_path: Path, kind: str) -> None:
    """Saved with it and loaded without, and the other way round: the same bits."""
    apart, plain = str(tmp_path / "apart"), str(tmp_path / "plain")
    for whole, continued in zip(
        run2(before_and_after, 3, *KINDS[kind], apart), run2(after, 3, *KINDS["adamw"], apart), strict=True
    ):
        check_equal(continued, whole, 0.0)
    for whole, continued in zip(
        run2(before_and_after, 3, *KINDS["adamw"], plain), run2(after, 3, *KINDS[kind], plain), strict=True
    ):
        check_equal(continued, whole, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "lora"])
@pytest.mark.parametrize("saved_on", [1, 2, 3, 4])
def test_from_any_stage_and_number_of_ranks_to_any(run: Run, tmp_path: Path, saved_on: int, kind: str) -> None:
    """Stages 0 to 3 on 1 to 4 ranks, in all pairs."""
    for stage in range(4):
        path = str(tmp_path / f"stage{stage}")
        expected = run(saved_on, before_and_after, stage, *KINDS[kind], path)[0]
        for other_stage, other_world in itertools.product(range(4), (1, 2, 3, 4)):
            for got in run(other_world, after, other_stage, *KINDS[kind], path):
                check_equal(got, expected, 0.0 if (other_stage, other_world) == (stage, saved_on) else 1e-6)


@pytest.mark.slow
def test_eight_ranks(run: Run, tmp_path: Path) -> None:
    """From one, two and four ranks to eight, and from eight to two: slices of a few elements, and empty ones."""
    for saved_on, stage, other in ((1, 0, 8), (2, 3, 8), (4, 2, 8), (8, 3, 2), (8, 3, 8)):
        path = str(tmp_path / f"{saved_on}-{other}")
        expected = run(saved_on, before_and_after, stage, "mixed", "adamw", {}, path, timeout=300.0)[0]
        for got in run(other, after, 3, "mixed", "adamw", {}, path, timeout=300.0):
            check_equal(got, expected, 0.0 if other == saved_on else 1e-6)


def goes_back(stage: int, path: str) -> tuple[Any, Any]:
    """What a run gives from a checkpoint on that was saved before its first step, and what when it goes back to it."""
    job = Job(stage, Mixed)
    job.save(path, asynchronous=False)
    results = []
    for again in (False, True):
        if again:
            with torch.no_grad():
                job.model(torch.ones(2, 6))  # its values are gathered
            job.load(path)
        with torch.no_grad():
            answer = job.model(torch.ones(2, 6)).clone()
        results.append((answer, *job.train(3), *job.result().values()))
    return results[0], results[1]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_run_that_goes_back_to_its_beginning_begins_anew(run2: Run, tmp_path: Path, stage: int) -> None:
    """Nothing of what was gathered or of the optimizer's state is left."""
    for first, again in run2(goes_back, stage, str(tmp_path / "saved")):
        torch.testing.assert_close(again, first, rtol=0, atol=0)


def test_an_optimizer_that_has_not_stepped_takes_groups_and_state(tmp_path: Path) -> None:
    """What the groups were set to on the way is loaded, and parameters without state have none."""
    job = Job(2, Mixed)
    job.train(2)
    job.optimizer.param_groups[0]["lr"] = 0.125
    shardproof.save(job.model, job.optimizer, tmp_path / "saved", asynchronous=False)
    fresh = Job(0, Mixed, seed=1)
    shardproof.load(fresh.model, fresh.optimizer, tmp_path / "saved")
    assert fresh.optimizer.param_groups[0]["lr"] == 0.125
    assert fresh.optimizer.param_groups[1]["weight_decay"] == 0.0
    params = dict(fresh.model.named_parameters())
    assert params["unused"] not in fresh.optimizer.state
    assert int(fresh.optimizer.state[params["scale"]]["step"]) == 2
    assert fresh.optimizer.state[params["head.weight"]]["exp_avg"].shape == params["head.weight"].shape


@pytest.mark.parametrize(
    ("saved", "loaded"), [("adamw", "momentum"), ("adamw", "muon"), ("muon", "adafactor"), ("adafactor", "adamw")]
)
def test_state_of_another_optimizer_is_refused_by_name(tmp_path: Path, saved: str, loaded: str) -> None:
    """It would be taken for its own, or silently left aside. The model is as it was."""
    job = Job(0, Mixed, OPTIMIZERS[saved])
    job.train(1)
    job.save(tmp_path / "saved", asynchronous=False)
    other = Job(0, Mixed, OPTIMIZERS[loaded], seed=3)
    before = other.result()
    names = [type(each.optimizer).__name__ for each in (job, other)]
    text = f"is {names[0]}, and this one is {names[1]}, which keeps different state. Continue with {names[0]}, or "
    with pytest.raises(shardproof.CheckpointError, match=text):
        other.load(tmp_path / "saved")
    assert all(torch.equal(value, before[name]) for name, value in other.result().items())
    shardproof.load(other.model, None, tmp_path / "saved")
    assert torch.equal(other.result()["head.weight"], job.result()["head.weight"])


def slices_of(path: str) -> list[tuple[str, int]]:
    job = Job(3, Mixed)
    job.train(1)
    job.save(path, asynchronous=False)
    state = job.optimizer.state
    return [(name, state[p]["exp_avg"].numel()) for name, p in job.model.named_parameters() if p in state]


def test_every_rank_writes_what_it_holds_and_nothing_twice(run2: Run, tmp_path: Path) -> None:
    """The chunks of a tensor cover it once, tied weights are there once, and both ranks have a file."""
    ranks = run2(slices_of, str(tmp_path / "saved"))
    manifest = Manifest.read(tmp_path / "saved")
    for name, tensor in manifest.tensors.items():
        end = 0
        for first, count, _ in sorted(tensor.chunks, key=lambda chunk: chunk[0]):
            assert first == end, name
            end += count
        assert end == torch.Size(tensor.shape).numel(), name
    for rank, slices in enumerate(ranks):
        for name, count in slices:
            chunks = manifest.tensors[f"optimizer.state.{name}.exp_avg"].chunks
            assert sum(c for _, c, piece in chunks if piece.file.startswith(f"__{rank}_")) == count
    assert "model.tied.weight" not in manifest.tensors
    assert "model.rebuilt" not in manifest.tensors
    assert manifest.tensors["model.empty"].chunks == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_file_has_the_room_of_what_it_holds(tmp_path: Path, asynchronous: bool) -> None:
    """torch.save would write all that a parameter shares its memory with, for each again."""
    model = shardproof.shard(torch.nn.Linear(64, 64), 3)
    with mock.patch.object(parts, "CHUNK", 500):
        shardproof.save(model, None, tmp_path / "saved", asynchronous=asynchronous).wait()
    for tensor in Manifest.read(tmp_path / "saved").tensors.values():
        assert all(piece.size < 4 * count + 2000 for _, count, piece in tensor.chunks)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_what_all_ranks_hold_they_write_in_equal_shares(world: int) -> None:
    """Up to one tensor; buffers are written by the first."""
    held = [parts.Part(str(n), (n,), 0, torch.zeros(n), True) for n in (5, 1, 9, 3, 0, 7, 2)]
    buffer = parts.Part("buffer", (40,), 0, torch.zeros(40), True, of_first=True)
    shares = [parts.to_write([buffer, *held], rank, world) for rank in range(world)]
    assert sorted(part.name for share in shares for part in share) == ["1", "2", "3", "5", "7", "9", "buffer"]
    assert shares[0][0] is buffer
    for share in shares:
        assert abs(sum(part.numel for part in share if part is not buffer) - 27 / world) <= 9


def test_what_was_copied_goes_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though somebody may keep what `save` returned."""
    held: list[parts.Part] = []

    def noted(*args: Any) -> list[parts.Part]:
        mine = parts.to_write(*args)
        held.extend(mine)
        return mine

    monkeypatch.setattr(api, "to_write", noted)
    saving = Job(0, Mixed).save(tmp_path / "saved")
    copies = [weakref.ref(part.local) for part in held]
    held.clear()
    saving.wait()
    gc.collect()
    assert copies
    assert not any(ref() is not None for ref in copies)


def test_a_compiled_model_is_saved_as_what_it_was_made_of(tmp_path: Path) -> None:
    job = Job(0, Mixed)
    shardproof.save(torch.compile(job.model), None, tmp_path / "saved", asynchronous=False)
    other = Job(0, Mixed, seed=3)
    shardproof.load(torch.compile(other.model), None, tmp_path / "saved")
    assert all(torch.equal(other.result()[name], value) for name, value in job.result().items())


def test_torch_reads_it_as_its_own(run2: Run, tmp_path: Path) -> None:
    """Other tools see a checkpoint of torch.distributed.checkpoint with flattened tensors."""
    import torch.distributed.checkpoint as dcp

    _, weights = run2(before_and_after, 3, *KINDS["adamw"], str(tmp_path / "saved"))[0]
    job = Job(0, Mixed)
    job.load(tmp_path / "saved")
    wanted = {"model.head.weight": torch.zeros(15), "model.blocks.1.up.weight": torch.zeros(35)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that one process is alone
        dcp.load(wanted, checkpoint_id=tmp_path / "saved", no_dist=True)
    for name, value in wanted.items():
        assert torch.equal(value, job.result()[name.removeprefix("model.")].flatten())
    assert weights.keys() == job.result().keys()


def test_frozen_weights_may_stay_out(tmp_path: Path) -> None:
    """Then the model that loads keeps its own, and a checkpoint does not pay for the base model."""
    job = Job(3, Mixed)
    job.train(1)
    job.save(tmp_path / "saved", asynchronous=False, frozen=False)
    other = Job(1, Mixed, seed=3)
    kept = other.result()["blocks.1.up.weight"].clone()
    other.load(tmp_path / "saved")
    assert torch.equal(other.result()["blocks.1.up.weight"], kept)
    assert torch.equal(other.result()["blocks.0.up.weight"], job.result()["blocks.0.up.weight"])
    other.model.blocks[1].requires_grad_(True)
    with pytest.raises(shardproof.CheckpointError, match=r"left out of it, but trained here: blocks\.1\.norm\.weight"):
        other.load(tmp_path / "saved")


def statistics_of_one_rank(path: str) -> tuple[list[float], list[float]]:
    """Of BatchNorms whose ranks saw other batches: those of this rank, and those of the checkpoint."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.BatchNorm1d(4) for _ in range(3)))
    model = shardproof.shard(net, stage=2)
    rank = torch.distributed.get_rank()
    for norm in model:
        norm((rank + 1) * torch.randn(8, 4) + rank)
    mine = [float(value.double().sum()) for value in model.buffers()]
    shardproof.save(model, None, path, asynchronous=False)
    shardproof.load(model, None, path)
    return mine, [float(value.double().sum()) for value in model.buffers()]


def test_buffers_are_a_set_of_one_rank(run2: Run, tmp_path: Path) -> None:
    (first, loaded), (other, also) = run2(statistics_of_one_rank, str(tmp_path / "there"))
    assert loaded == also == first != other
