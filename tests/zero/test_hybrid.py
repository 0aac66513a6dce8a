"""Promise: sharded within a row of the mesh and replicated across rows, numbers are those of one process, and what
crosses between rows is one part of the model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardproof
from checkpoint.runs import OPTIMIZERS, Job, Mixed, check_equal
from distributed.harness import Sharded, parity
from shardproof.zero.ranks.invariants import Invariants, digest
from zero.graphs import CASES
from zero.models import FEATURES, Net
from zero.test_dynamic import Omni, loss_of
from zero.test_dynamic import train as train_on_any_path


def mesh_of(rows: int) -> DeviceMesh:
    return init_device_mesh("cpu", (rows, dist.get_world_size() // rows), mesh_dim_names=("replicate", "shard"))


class Hybrid(Sharded):
    """The harness's engine on a mesh of `rows` copies."""

    def __init__(self, stage: int, rows: int) -> None:
        super().__init__(stage)
        self.mesh = mesh_of(rows)

    def shard(self, model: nn.Module, **options: Any) -> None:
        super().shard(model, mesh=self.mesh, **options)


def check(name: str, stage: int, rows: int) -> None:
    parity(name, CASES[name], Hybrid(stage, rows))


GRAPHS = [
    "plain",
    "tied_embedding_and_head",
    "checkpoint_of_a_block_used_twice_nonreentrant",
    "accumulation_with_no_sync",
    "penalty_on_the_gradient_of_all_parameters",
    "two_trained_models_in_one_graph",
    "edit_by_masks_and_foreach",
    "edit_through_whole_with_writeback",
    "half_and_integer_parameters_buffers_scalars",
]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name, stage", [(name, stage) for name in GRAPHS for stage in (1, 2, 3) if stage == 3 or name in GRAPHS[:4]]
)
def test_two_copies_of_two_parts_equal_one_process(run4, name, stage):
    run4(check, name, stage, 2)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("rows", [1, 4])
def test_one_row_shards_and_one_column_replicates(run4, rows, stage):
    run4(check, "plain", stage, rows)


def any_path(stage: int) -> None:
    torch.manual_seed(0)
    reference = Omni()
    model = shardproof.shard(copy.deepcopy(reference), stage, mesh=mesh_of(2))
    world = dist.get_world_size()
    expected = train_on_any_path(reference, list(range(world)), 1.0 / world)
    assert train_on_any_path(model, [dist.get_rank()], 1.0) == pytest.approx(expected, abs=1e-5)
    for name, value in shardproof.full_state_dict(model, rank0_only=False).items():
        torch.testing.assert_close(value, reference.state_dict()[name], atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_ranks_on_different_paths_equal_one_process(run4, stage):
    run4(any_path, stage)


def in_any_order(stage: int, steps: int) -> None:
    """Ranks are steps apart in what they add, look at gradients in between, and clear them before or after forward."""
    torch.manual_seed(0)
    model, rank = shardproof.shard(Omni(), stage, mesh=mesh_of(2)), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    end = Invariants.end

    def compared(self: Invariants, contributed: bool) -> None:
        end(self, contributed)
        self.check_replicas()
        grads = [flat.grad for flat in self.engine.flats]
        same = self.engine.comm.agree_on_parts([0 if grad is None else digest(grad) for grad in grads])
        assert all(same), [flat.names for flat, alike in zip(self.engine.flats, same, strict=True) if not alike]

    with mock.patch.object(Invariants, "end", compared):
        for step in range(steps):
            if not rank % 2:
                optimizer.zero_grad()
            for part in range(2):
                losses = [loss_of(model, step, rank + 10 * k + 5 * part) for k in range((step + 2 * part + rank) % 3)]
                if rank % 2 and part == 0:
                    optimizer.zero_grad()
                for loss in losses:
                    loss.backward()
                if part == 0:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_copies_add_the_same_gradients_in_the_same_order(run4, stage):
    """Sums of the same numbers in another order differ in last bits, and copies would drift apart."""
    run4(in_any_order, stage, 8)


def moved(stage: int) -> dict[str, int]:
    """What one step moves, and what this rank holds."""
    model = shardproof.shard(Net(), stage, mesh=mesh_of(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before: Any = None
    for _ in range(2):
        before = shardproof.stats(model).total
        model(torch.ones(2, FEATURES)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = shardproof.stats(model).total
    found = {name: getattr(after, name) - getattr(before, name) for name in vars(after)}
    return {**found, "held": after.shard_bytes}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_part_of_the_model_crosses_between_rows(run4, stage):
    for found in run4(moved, stage):
        assert found["bytes_reduced"] == 2 * found["held"], "two ranks hold one copy"
        assert found["bytes_between_replicas"] == 2 * found["held"], "an all-reduce of the part"
        assert found["bytes_gathered"] >= 2 * found["held"]


def on_two_ranks_of_four(stage: int) -> None:
    """A mesh over some of the ranks is a world of its own, with groups of its own."""
    names = ("data", "replicate", "shard")
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=names)["replicate", "shard"]
    torch.manual_seed(0)
    reference = Net()
    model = shardproof.shard(copy.deepcopy(reference), stage, mesh=mesh)
    x = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(dist.get_rank() // 2))
    half = dist.get_rank() % 2
    reference(x).square().mean().backward()
    model(x[2 * half : 2 * half + 2]).square().mean().backward()
    for p, expected in zip(model.parameters(), reference.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(p.grad.whole(), expected.grad, atol=1e-6, rtol=1e-6)


def test_a_mesh_of_some_ranks(run4):
    run4(on_two_ranks_of_four, 3)


def drifting() -> str:
    """One row's part is changed behind the engine's back."""
    model = shardproof.shard(Net(), 3, mesh=mesh_of(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if dist.get_rank() == 3:
        with torch.no_grad():
            model.blocks[1].down.weight.local.mul_(1.001)
    try:
        for _ in range(3):
            model(torch.ones(2, FEATURES)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except shardproof.DesyncError as error:
        return str(error)
    return ""


def test_copies_that_differ_are_named(run4):
    for text in run4(drifting):
        assert text.startswith("'blocks.1.down.weight': the ranks hold different values.")


def saved(path: str, optimizer: str) -> Any:
    job = Job(3, Mixed, OPTIMIZERS[optimizer], mesh=mesh_of(2))
    job.train(3)
    job.save(path).wait()
    return job.train(3), job.result()


def continued(rows: int | None, path: str, optimizer: str) -> Any:
    job = Job(3, Mixed, OPTIMIZERS[optimizer], seed=99, **({} if rows is None else {"mesh": mesh_of(rows)}))
    job.load(path)
    return job.train(3), job.result()


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("adafactor", marks=pytest.mark.slow)])
def test_a_checkpoint_is_written_once_and_continues_anywhere(run4, run2, tmp_path: Path, optimizer: str):
    path = str(tmp_path / "saved")
    expected = run4(saved, path, optimizer)[0]
    size = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
    check_equal(run4(continued, 2, path, optimizer)[0], expected, 0.0)
    check_equal(run4(continued, None, path, optimizer)[0], expected, 1e-6)
    check_equal(run2(continued, None, path, optimizer)[0], expected, 1e-6)
    whole = str(tmp_path / "whole")
    run4(saved_without_copies, whole, optimizer)
    once = sum(file.stat().st_size for file in Path(whole).rglob("*") if file.is_file())
    assert size < 1.2 * once, "no part is written twice"


def saved_without_copies(path: str, optimizer: str) -> None:
    job = Job(3, Mixed, OPTIMIZERS[optimizer])
    job.train(3)
    job.save(path).wait()


def more_groups_on_some_ranks() -> None:
    """Torch names a group that only its members make by how many groups they have, and from 2.15 every group: there its
    own meshes cannot be made after this."""
    engine = Hybrid(3, 2)
    if dist.get_rank() > 1:
        dist.new_group([2, 3], use_local_synchronization=True)
    parity("plain", CASES["plain"], engine)
    if dist.get_rank() <= 1:  # the tests after this one have ranks with as many groups
        dist.new_group([0, 1], use_local_synchronization=True)


def test_ranks_may_have_other_groups_of_their_own(run4):
    run4(more_groups_on_some_ranks)


def groups_after_ours() -> int:
    """Half of the ranks have a sharded model of their own. All then make a group, which torch names by a count."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "shard"))["shard"]
    if dist.get_rank() > 1:
        model = shardproof.shard(Net(), 3, mesh=mesh)
        model(torch.ones(2, FEATURES)).sum().backward()
    return dist.get_world_size(dist.new_group(list(range(4))))


def test_groups_of_ours_do_not_name_those_of_the_user(run4):
    assert run4(groups_after_ours) == [4] * 4


def rows_after_a_group_of_some() -> None:
    """Two ranks of different rows have shared a model before: ranks of a row have made different numbers of groups."""
    some, others = DeviceMesh("cpu", [1, 2]), DeviceMesh("cpu", [0, 3])
    if dist.get_rank() in (1, 2):
        shardproof.shard(Net(), 3, mesh=some)
    model = shardproof.shard(Net(), 3, mesh=mesh_of(2)["replicate"])
    model(torch.ones(2, FEATURES)).sum().backward()
    if dist.get_rank() in (0, 3):  # as above
        shardproof.shard(Net(), 3, mesh=others)


def test_ranks_of_a_row_may_have_had_models_with_others(run4):
    run4(rows_after_a_group_of_some)
