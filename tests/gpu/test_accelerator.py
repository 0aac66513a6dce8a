"""Promise: with accelerators the engine does what its other tests promise on the CPU. `make test-gpu` runs all of this.

Without an accelerator everything is skipped. SHARDPROOF_TEST_DEVICE=cpu runs what makes sense there on the CPU, which
shows that the tests themselves work. One device is enough for most: two ranks share it through gloo. With a device
for each rank the same runs through the backend of the device (NCCL). Where nothing can be installed, a Python that has
torch, transformers and pytest is enough: PYTHONPATH=src python -m pytest -v tests/gpu tests/zero/test_accelerators.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardproof
from distributed.harness import Alone, Record, Sharded, compare, train
from shardproof.train.model import activations
from shardproof.zero.comm import collectives
from shardproof.zero.device import default_device, side_stream
from shardproof.zero.ranks.invariants import Invariants
from shardproof.zero.schedule import home
from zero.graphs import CASES
from zero.models import FEATURES, Block, Net

KIND = os.environ.get("SHARDPROOF_TEST_DEVICE") or str(
    torch.accelerator.current_accelerator(check_available=True) or ""
)
COUNT = torch.accelerator.device_count() if KIND not in ("", "cpu") else 0
TOLERANCE = 1e-4  # of the largest magnitude: kernels are others for other sizes, and AdamW divides by what is small

pytestmark = pytest.mark.skipif(not KIND, reason="no accelerator")
accelerator = pytest.mark.skipif(KIND in ("", "cpu"), reason="not on the CPU")


def devices(count: int) -> Any:
    return pytest.mark.skipif(count > COUNT, reason=f"needs {count} accelerators")


GLOO, OWN = "gloo", pytest.param("own", marks=devices(2))


def here() -> torch.device:
    return torch.device("cpu") if KIND == "cpu" else default_device()


def mesh_of(backend: str) -> DeviceMesh | None:
    """All ranks, on the backend of their devices; None for the default group, which is gloo's."""
    if backend == GLOO:
        return None
    here()
    group = dist.new_group(backend=dist.get_default_backend_for_device(KIND))
    return DeviceMesh.from_group(group, KIND, mesh_dim_names=("shard",))


def rows_and_columns() -> DeviceMesh:
    """Four ranks as two copies of two parts."""
    here()
    backend, rank = dist.get_default_backend_for_device(KIND), dist.get_rank()
    groups = {ranks: dist.new_group(list(ranks), backend=backend) for ranks in ((0, 2), (1, 3), (0, 1), (2, 3))}
    mine = [
        next(group for ranks, group in part if rank in ranks)
        for part in (list(groups.items())[:2], list(groups.items())[2:])
    ]
    return DeviceMesh.from_group(
        mine, KIND, mesh=torch.arange(4, device="cpu").view(2, 2), mesh_dim_names=("replicate", "shard")
    )


def trained(name: str, engine: Alone, **options: Any) -> Record:
    """The case with everything on the device of this rank."""
    case, device = CASES[name], here()
    torch.backends.cudnn.allow_tf32 = False  # another batch may take another algorithm, with fewer digits

    def rows(k: int, n: int) -> Any:
        with torch.device("cpu"):  # of one generator, whatever the device
            batch = case.rows(k, n)
        return torch.utils._pytree.tree_map(lambda x: x.to(device), batch)

    with torch.device(device):  # what a step makes anew
        record = train(dataclasses.replace(case, rows=rows, options={**case.options, **options}), engine)
    record.states = [{name: value.cpu() for name, value in state.items()} for state in record.states]
    return record


def parity(names: list[str], stage: int, backend: str = GLOO, copies: int = 1, **options: Any) -> None:
    options |= {"device": here()}
    mesh = mesh_of(backend) if copies == 1 else rows_and_columns()
    for name in names:
        try:
            compare(
                trained(name, Sharded(stage), mesh=mesh, **options),
                trained(name, Alone()),
                max(TOLERANCE, CASES[name].tolerance),
            )
        except Exception as error:
            error.add_note(f"in the graph {name!r}")
            raise


# --- the numbers --------------------------------------------------------------------------------------

SOME = [
    "plain",
    "tied_embedding_and_head",
    "checkpoint_of_a_block_used_twice_nonreentrant",
    "accumulation_with_no_sync",
    "optimizer_adamw_fused",
    "edit_by_masks_and_foreach",
    "penalty_on_the_gradient_of_all_parameters",
    "gradient_scaler",
]


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank(run, stage):
    run(1, parity, SOME, stage)


@pytest.mark.parametrize("backend", [GLOO, OWN])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks(run2, stage, backend):
    run2(parity, SOME, stage, backend)


def behind_the_first_steps(names: list[str], stage: int, backend: str) -> None:
    """Where torch saves weights as it does without an engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Invariants, "early", False)
        parity(names, stage, backend)


@accelerator
@pytest.mark.parametrize("name", CASES)
def test_one_rank_behind_the_first_steps(run, name):
    run(1, behind_the_first_steps, [name], 3, GLOO)


@pytest.mark.parametrize("backend", [GLOO, OWN])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_ranks_behind_the_first_steps(run2, stage, backend):
    run2(behind_the_first_steps, SOME, stage, backend)


@accelerator
@pytest.mark.parametrize("name", CASES)
def test_every_graph(run2, name):
    run2(parity, [name], 3, GLOO if COUNT < 2 else "own")


@devices(4)
@pytest.mark.parametrize("stage", [2, 3])
def test_two_copies_of_two_parts(run4, stage):
    run4(parity, ["plain", "accumulation_with_no_sync"], stage, "own", 2)


@pytest.mark.parametrize("backend", [GLOO, OWN])
@pytest.mark.parametrize("stage", [0, 3])
def test_one_order_of_additions(run2, stage, backend):
    run2(parity, ["plain"], stage, backend, deterministic=True)


@pytest.mark.parametrize("backend", [GLOO, OWN])
@pytest.mark.parametrize("offload", ["optimizer", "all", "nvme"])
@pytest.mark.parametrize("stage", [0, 3])
def test_offload(run2, stage, offload, backend, tmp_path):
    where = f"nvme:{tmp_path}" if offload == "nvme" else offload
    run2(parity, ["plain", "accumulation_with_no_sync", "optimizer_adamw_fused"], stage, backend, offload=where)


class OnePath(Net):
    """`skipped`: the block that this forward leaves out."""

    skipped = -1

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for i, block in enumerate(self.blocks):
            h = h if i == self.skipped else block(h)
        return self.norm(h)


def on_different_paths(stage: int, backend: str) -> None:
    torch.manual_seed(0)
    plain = OnePath().to(here())
    torch.manual_seed(0)
    model = shardproof.shard(OnePath(), stage, mesh=mesh_of(backend), device=here())
    both = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (plain, model)]
    for step in range(10):  # the first five by words and then by plan, which rank 1 leaves
        batches = [torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(10 * step + r)) for r in (0, 1)]
        skipped = [-1, step % 3 if step > 4 else -1]
        for rank in (0, 1):
            plain.skipped = skipped[rank]
            (plain(batches[rank].to(here())).square().mean() / 2).backward()
        model.skipped = skipped[dist.get_rank()]
        model(batches[dist.get_rank()].to(here())).square().mean().backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (plain, model)]
        torch.testing.assert_close(*norms, rtol=1e-4, atol=1e-5)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    state = shardproof.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(state, {n: v.cpu() for n, v in plain.state_dict().items()}, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", [GLOO, OWN])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_on_different_paths(run2, stage, backend):
    run2(on_different_paths, stage, backend)


# --- threads, streams, memory -------------------------------------------------------------------------


class Forces(nn.Module):
    """Differentiates what blocks compute inside its own forward: backward, which recomputes, runs in torch's thread."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        energy = checkpoint(self.net, x, use_reentrant=False).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force + self.net(x).sum()


def forces(backend: str) -> None:
    torch.manual_seed(0)
    model = Forces()
    expected = Forces().to(here())
    expected.load_state_dict(model.state_dict())
    shardproof.shard(model, 3, mesh=mesh_of(backend), device=here())
    for _ in range(3):
        x = torch.randn(4, FEATURES).to(here())
        for m in (model, expected):
            m.zero_grad()
            m(x.clone()).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(p.grad.norm(), q.grad.norm(), rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("backend", [GLOO, OWN])
def test_a_backward_pass_inside_a_forward(run2, backend):
    run2(forces, backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_host_rounds_as_the_accelerator(dtype):
    """With offload it casts for it."""
    bits = torch.cat([torch.randint(-(2**31), 2**31, (2**20,)), torch.arange(0, 2**24, 2**5)]).int()
    ties = bits & -(2**12) | 2**11
    for values in (bits, bits & -(2**16) | 2**15, ties, ties - 1):
        values = values.view(torch.float32)
        values = values[~values.isnan()]
        assert torch.equal(values.to(dtype), values.to(here()).to(dtype).cpu())


class Wide(nn.Module):
    """Blocks of 4 MB, so that kernels take longer than their launch."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """Inside, torch raises where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def steady(stage: int, backend: str, quiet: bool) -> None:
    """Steps by plan: the host never waits for the device, and no memory is kept."""
    model = shardproof.shard(Wide(), stage, mesh=mesh_of(backend), device=here(), mixed_precision=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = torch.randn(64, 1024).to(here())
    before, held = shardproof.stats(model), []  # votes are those of all models on the group
    for step in range(14):
        with no_synchronisation() if quiet and step > 10 else contextlib.nullcontext():
            model(batch).float().square().mean().backward()
            shardproof.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if KIND != "cpu":
            held.append(torch.accelerator.memory_allocated())
    assert len(set(held[6:])) <= 1, held
    stats = shardproof.stats(model)
    assert stats.exposed_seconds >= 0
    assert stats.votes_apart == before.votes_apart


@pytest.mark.parametrize("backend", [GLOO, OWN])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_steps_keep_no_memory_and_the_host_runs_ahead(run2, stage, backend):
    run2(steady, stage, backend, KIND == "cuda" and backend == "own")


@accelerator
def test_one_rank_runs_ahead(run):
    run(1, steady, 3, GLOO, KIND == "cuda")


@contextlib.contextmanager
def late(model: nn.Module, where: str) -> Iterator[None]:
    """Inside, kernels begin some milliseconds late: those that run `beside` the computing, or the `computing` itself.
    What does not wait for them reads what was there before."""
    busy = torch.zeros(4096 if KIND != "cpu" else 8, 4096, device=here())

    def dawdle(*_: Any) -> None:
        for _ in range(8):
            busy @ busy.T

    @contextlib.contextmanager
    def lately(*args: Any) -> Iterator[torch.Stream]:
        with side_stream(*args) as stream:
            dawdle()
            yield stream

    with contextlib.ExitStack() as stack:
        for module in (collectives, home, activations) if where == "beside" else ():
            stack.enter_context(mock.patch.object(module, "side_stream", lately))
        for block in model.blocks if where == "computing" else ():
            stack.callback(block.register_forward_pre_hook(dawdle).remove)
            stack.callback(block.register_full_backward_hook(dawdle).remove)
        yield
        if KIND != "cpu":
            torch.accelerator.synchronize()


def the_same_though_late(stage: int, where: str, backend: str, offload: str | None, copies: int = 1) -> None:
    mesh, found = mesh_of(backend) if copies == 1 else rows_and_columns(), []
    for slow in ("nothing", where):
        torch.manual_seed(0)
        options = {"mesh": mesh, "device": here(), "offload": offload, "mixed_precision": torch.bfloat16}
        model = shardproof.shard(Wide(), stage, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        batches = [torch.randn(64, 1024, generator=torch.Generator().manual_seed(i)).to(here()) for i in range(8)]
        with late(model, slow):
            for step in range(4):
                for batch in batches[2 * step : 2 * step + 2]:
                    with activations.HeldByHost(here(), smallest=0):
                        loss = model(batch).float().square().mean()
                    loss.backward()
                shardproof.clip_grad_norm_(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()
        found.append(shardproof.full_state_dict(model, rank0_only=False))
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())


LATE = pytest.mark.parametrize("where", ["beside", "computing"])
OFFLOADS = pytest.mark.parametrize("offload", [None, "optimizer", "all"])


@LATE
@OFFLOADS
@pytest.mark.parametrize("stage", [0, 3])
def test_a_kernel_that_begins_late_is_waited_for(run, stage, where, offload):
    run(1, the_same_though_late, stage, where, GLOO, offload)


@LATE
@OFFLOADS
@pytest.mark.parametrize("backend", [GLOO, OWN])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_kernel_that_begins_late_is_waited_for_on_two_ranks(run2, stage, where, offload, backend):
    run2(the_same_though_late, stage, where, backend, offload)


@LATE
@devices(4)
def test_a_kernel_that_begins_late_is_waited_for_with_copies(run4, where):
    run4(the_same_though_late, 3, where, "own", None, 2)


def on_the_device(offload: str) -> tuple[int, int]:
    """Bytes that steps take there at most beyond what lies there between them, and bytes of a block's masters."""
    model = shardproof.shard(Wide(24), 3, device=here(), offload=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = torch.randn(4, 1024).to(here())
    for step in range(3):
        if step == 2:
            torch.accelerator.reset_peak_memory_stats()
            before = torch.accelerator.memory_allocated()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.accelerator.max_memory_allocated() - before, 4 * 1024 * 1025


@accelerator
@pytest.mark.parametrize(("offload", "few"), [("all", 10), ("optimizer", 24 + 10)])
def test_what_is_offloaded_takes_little_of_the_device(run, offload, few):
    """Neither parameters nor gradients on their way home pile up while the host runs ahead."""
    for taken, block in run(1, on_the_device, offload):
        assert taken < few * block


def saved_while_training_goes_on(folder: Path, backend: str) -> None:
    model = shardproof.shard(Wide(), 3, mesh=mesh_of(backend), device=here())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batch = torch.randn(64, 1024).to(here())
    for step in range(3):
        model(batch).square().mean().backward()
        optimizer.step()
        if step == 1:
            expected = shardproof.full_state_dict(model, rank0_only=False)
            saving = shardproof.save(model, optimizer, folder / "saved")
    saving.wait()
    shardproof.load(model, optimizer, folder / "saved")
    got = shardproof.full_state_dict(model, rank0_only=False)
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    model(batch).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("backend", [GLOO, OWN])
def test_a_checkpoint_has_the_values_of_its_moment(run2, tmp_path, backend):
    run2(saved_while_training_goes_on, tmp_path, backend)


def test_activations_held_by_the_host():
    torch.manual_seed(0)
    device = here()
    model, gradients = shardproof.shard(nn.Sequential(*(Block() for _ in range(8))), 3, device=device), []
    x = torch.randn(512, 5).to(device)
    for held in (False, True):
        with activations.HeldByHost(device, smallest=0) if held else contextlib.nullcontext():
            loss = F.mse_loss(model(x), x)
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def unlike(stage: int) -> None:
    model = shardproof.shard(Net(), stage)
    assert {p.device for p in model.parameters()} == {here()}
    assert {p.flat.locals[p.index].data_ptr() % 16 for p in model.parameters()} == {0}


@accelerator
def test_each_rank_takes_its_device(run2):
    run2(unlike, 3)
