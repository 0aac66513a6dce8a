"""Promise: what is different with an accelerator, as far as it shows without one. See tests/gpu for the rest."""

from __future__ import annotations

import copy
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C import _autograd
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode

import shardproof
from distributed.harness import listening
from shardproof.errors import DesyncError, DeviceError
from shardproof.zero import api, device, exposed
from shardproof.zero.schedule import edits
from zero.models import Net


class Kernels(TorchDispatchMode):
    """Counts operations that compute, and how often the host asks for what came out."""

    count, asked = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view and func is not torch.ops.aten.promote_types.default
        self.asked += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        return func(*args, **(kwargs or {}))


# --- which device is a rank's ---------------------------------------------------------------------


class Accelerators:
    """`count` of them, as torch.accelerator tells of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, present: int = 0) -> None:
        self.count, self.present = count, present
        told = {
            "current_accelerator": lambda check_available=False: torch.device("cuda"),
            "device_count": lambda: self.count,
            "current_device_index": lambda: self.present,
            "set_device_index": self.choose,
            "memory_reserved": lambda device: 50,
            "memory_allocated": lambda device: 20,
        }
        for name, answer in told.items():
            monkeypatch.setattr(torch.accelerator, name, answer)

    def choose(self, index: int) -> None:
        assert index < self.count, "invalid device ordinal"
        self.present = index


@pytest.mark.parametrize(
    ("count", "chosen", "rank", "expected"),
    [(8, 0, "3", 3), (1, 0, "3", 0), (4, 2, "1", 2), (8, 0, None, 0)],
    ids=["by rank on the node", "each process sees its own", "chosen before", "no launcher"],
)
@pytest.mark.parametrize("word", ["LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"])
def test_the_device_of_a_rank(monkeypatch, count, chosen, rank, expected, word):
    for other in device.LOCAL_RANK:
        monkeypatch.delenv(other, raising=False)
    if rank is not None:
        monkeypatch.setenv(word, rank)
    here = Accelerators(monkeypatch, count, chosen)
    assert device.default_device() == torch.device("cuda", expected)
    assert here.present == expected
    assert api._device("cuda") == torch.device("cuda", expected)


def started_by_torchrun(monkeypatch: pytest.MonkeyPatch, rank: int, processes: int) -> None:
    said = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)}
    for name, value in said.items():
        monkeypatch.setenv(name, value)


def test_more_processes_than_accelerators_are_refused(monkeypatch):
    """torchrun shows all of them the same ones; that they have been enough for the first ranks is no sign."""
    Accelerators(monkeypatch, 2)
    started_by_torchrun(monkeypatch, rank=1, processes=3)
    assert device.default_device() == torch.device("cuda", 1)
    Accelerators(monkeypatch, 2)
    started_by_torchrun(monkeypatch, rank=2, processes=3)
    with pytest.raises(DeviceError, match=r"3 processes .* 2 accelerator\(s\), and two cannot share one.\nStart 2"):
        device.default_device()


def test_in_a_group_of_gloo_they_share(monkeypatch):
    """The program has made it, and so has asked for it."""
    Accelerators(monkeypatch, 1)
    started_by_torchrun(monkeypatch, rank=1, processes=2)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert device.default_device() == torch.device("cuda", 0)
    finally:
        torch.distributed.destroy_process_group()


def test_memory_that_the_allocator_keeps_is_free(monkeypatch):
    Accelerators(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    assert device.free_memory(torch.device("cuda", 0), 1) == 100 + 50 - 20


class Event:
    """As a real one, of one device."""

    def __init__(self, device: torch.device, enable_timing: bool = False) -> None:
        self.device = device

    def record(self, stream: torch.device | None = None) -> None:
        present = torch.device("cuda", torch.accelerator.current_device_index())
        assert (stream or present) == self.device, "Event device index does not match recording stream's"


def test_waits_are_timed_on_a_device_that_is_not_the_present_one(monkeypatch):
    """`shard(model, 3, device="cuda:1")` in a program that has not called `set_device`."""
    Accelerators(monkeypatch, 2)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: device)
    monkeypatch.setattr(torch, "Event", Event)
    clock = exposed.Clock(torch.device("cuda", 1))
    assert clock.mark().device == torch.device("cuda", 1)


# --- threads: backward runs in one of torch's -----------------------------------------------------


class AgainInAThread(nn.Module):
    """Enters itself once more in a thread it waits for, as a backward pass inside a forward does that recomputes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.depths: list[int] = []

    def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
        if again:
            thread = threading.Thread(target=self, args=(x, False))
            thread.start()
            thread.join()
        unit = next(u for u in self.engine.units if self in u.entries)
        self.depths.append(unit.depth)
        return self.linear(x)


def test_a_forward_that_another_thread_is_waited_for_in_has_not_ended():
    model = nn.Sequential(AgainInAThread(), nn.Linear(6, 2))
    shardproof.shard(model, 3, units=[AgainInAThread], device="cpu")
    inner = model[0]
    inner.__dict__["engine"] = model._shardproof
    model(torch.randn(3, 6)).sum().backward()
    assert inner.depths == [2, 1]
    assert _autograd._top_saved_tensors_default_hooks(False) is None
    assert inner.linear.weight.grad.norm() > 0


# --- errors of kernels come late ------------------------------------------------------------------


class FailingWork:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def wait(self) -> None:
        raise self.error


def an_error_of_this_rank(kind: type[Exception], text: str) -> str:
    model = shardproof.shard(Net(), 3, device="cpu")
    waiting = model._shardproof.streams.waiting(model._shardproof.number, 0)
    with pytest.raises(kind) as raised, waiting:
        FailingWork(kind(text)).wait()
    assert not isinstance(raised.value, DesyncError)
    return str(raised.value)


@pytest.mark.parametrize("kind", [torch.AcceleratorError, RuntimeError])
def test_an_error_of_this_rank_is_not_taken_for_a_rank_that_is_gone(run2, kind):
    text = "CUDA error: device-side assert triggered"
    assert run2(an_error_of_this_rank, kind, text) == [text] * 2


# --- what is under way when an optimizer steps -----------------------------------------------------


def a_gather_that_nobody_used(stage: int) -> tuple[bool, list[bool]]:
    model = shardproof.shard(Net(), stage, device="cpu")
    seen = []

    class Looks(torch.optim.SGD):
        elementwise = True  # or it would be tried

        def step(self, closure=None):
            seen.append(any(flat.gathering is not None for flat in model._shardproof.flats))
            super().step(closure)

    optimizer = Looks(model.parameters(), lr=0.1)
    for early in (False, False, True):
        x = torch.randn(4, 6)
        if early:  # predicts the next block, and does not come to it
            with torch.no_grad():
                model.blocks[0](torch.randn(4, 5))
        else:
            model(x).sum().backward()
        under_way = any(flat.gathering is not None for flat in model._shardproof.flats)
        optimizer.step()
        optimizer.zero_grad()
    return under_way, seen


@pytest.mark.parametrize("stage", [1, 3])
def test_no_gather_is_under_way_when_values_change(run2, stage):
    """An accelerator reads a slice when the collective runs, not when it is queued."""
    for under_way, seen in run2(a_gather_that_nobody_used, stage):
        assert under_way
        assert seen == [False, False, False]


# --- collectives of the backend, where the CPU has its own ------------------------------------------


def by_hand_and_by_the_backend() -> None:
    comm, rank, found = shardproof.shard(Net(), 3, device="cpu")._shardproof.comm, dist.get_rank(), []
    outgoing, incoming = [([3, 2], [3, 1]), ([1, 2], [2, 2])][rank]
    for comm.by_hand in (True, False):
        whole = torch.arange(8.0) + 10 * rank
        terms = [comm.contributions(whole, sharded, 1 << 20).wait().clone() for sharded in (True, False)]
        sends = torch.arange(float(sum(outgoing))) + 10 * rank
        found.append([*terms, *comm.exchange(sends, outgoing, incoming)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert found[0][3].tolist() == ([10.0] if rank == 0 else [11.0, 12.0])


def test_what_the_backend_exchanges_is_what_is_exchanged_by_hand(run2):
    run2(by_hand_and_by_the_backend)


def sums_of_complex_values() -> list[list[complex]]:
    comm, rank = shardproof.shard(Net(), 3, device="cpu")._shardproof.comm, dist.get_rank()
    found = []
    for comm.by_hand in (True, False):
        whole = torch.arange(4) * (1 + 2j) + rank
        found.append(comm.reduce_scatter(whole, 1 << 20).wait().tolist())
    return found


def test_complex_gradients_are_added_as_real_ones_by_the_backend(run2):
    """NCCL knows none, and what torch hands to it is as it was given."""
    first, second = run2(sums_of_complex_values)
    assert first == [[1, 3 + 4j]] * 2
    assert second == [[5 + 8j, 7 + 12j]] * 2


# --- what the host asks for ------------------------------------------------------------------------


class Edits(nn.Linear):
    """Halves its bias in each forward, which torch does not count."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.bias.data.mul_(0.5)
        return out


def looks(queued: bool) -> tuple[int, list[float]]:
    """How often the host asks whether values are the same in a forward that edits nothing, and what another leaves."""
    torch.manual_seed(0)
    model = shardproof.shard(nn.Sequential(Edits(6, 6), nn.Linear(6, 6)), 3, units=[nn.Linear], device="cpu")
    engine = model._shardproof
    engine.pool.keeps = not queued
    pieces = mock.patch.multiple(edits, PIECE=8, PIECE_QUEUED=8)
    with torch.no_grad(), pieces:
        model(torch.ones(2, 6))
        with Kernels() as kernels:
            model[1](torch.ones(2, 6))
    return kernels.asked, shardproof.full_state_dict(model, rank0_only=False)["0.bias"].tolist()


def test_an_edit_in_forward_is_found_with_one_question_to_the_device(run2):
    for (queued, kept), (one_by_one, expected) in zip(run2(looks, True), run2(looks, False), strict=True):
        assert queued == 1 < one_by_one
        assert kept == expected


def ends_of(steps: int) -> int:
    model = shardproof.shard(Net(), 3, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(4, 6)).sum().backward()
        clip_grad_norm_(model.parameters(), 1.0)  # looks through the gradients twice
        optimizer.step()
        optimizer.zero_grad()
    return model._shardproof.invariants.ends


def test_steps_are_counted_once(run2):
    assert run2(ends_of, 4) == [4, 4]


def test_a_group_is_left_alone_after_an_error_where_nccl_would_wait(monkeypatch):
    ended = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append(True))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    api._leave_group()
    assert ended == [True]
    monkeypatch.setattr("sys.last_value", ValueError("a step failed"), raising=False)
    api._leave_group()
    assert ended == [True]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    api._leave_group()
    assert ended == [True, True]


# --- fp16 -----------------------------------------------------------------------------------------


def test_a_fused_step_that_overflowed_is_not_called_one_that_changes_nothing():
    torch.manual_seed(0)
    model = shardproof.shard(Net(), 1, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with listening() as lines:
        for factor in (float("inf"), 1.0):
            before = [p.detach().clone() for p in model.parameters()]
            loss = model(torch.randn(4, 6)).square().mean()
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            moved = [bool((p != q).any()) for p, q in zip(model.parameters(), before, strict=True)]
            assert all(moved) == (factor == 1.0)
    assert lines == []
    assert optimizer.__dict__["_shardproof_steps"] == 1


# --- many small kernels ------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [shardproof.clip_grad_norm_, lambda m, norm: clip_grad_norm_(m.parameters(), norm)])
def test_clipping_takes_as_many_kernels_for_many_parameters_as_for_few(clip):
    counts = set()
    for length in (2, 12):
        model = shardproof.shard(nn.Sequential(*(nn.Linear(6, 6) for _ in range(length))), 3, device="cpu")
        model(torch.ones(2, 6)).sum().backward()
        with Kernels() as kernels:
            norm = clip(model, 1.0)
        assert norm > 1.0
        counts.add(kernels.count)
    assert len(counts) == 1


# --- torch.set_default_device ------------------------------------------------------------------------


def default_elsewhere(stage: int, offload: str | None) -> None:
    """On "meta" nothing has a value: what does not say where it lies is found at once."""
    torch.manual_seed(0)
    plain, batch = Net(), torch.randn(4, 6)
    model = copy.deepcopy(plain)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    with torch.device("meta"):
        shardproof.shard(model, stage, device="cpu", offload=offload)
        model.zero_grad()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(batch).square().mean().backward()
            shardproof.clip_grad_norm_(model, 1e9)
            optimizer.step()
            optimizer.zero_grad()
        shardproof.barrier(model)
        state = shardproof.full_state_dict(model, rank0_only=False)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        plain(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(state, dict(plain.state_dict()))


@pytest.mark.parametrize("stage", [0, 3])
def test_another_default_device_changes_nothing(run2, tmp_path, stage):
    run2(default_elsewhere, stage, None)
    run2(default_elsewhere, stage, f"nvme:{tmp_path}")


def test_sums_are_made_in_what_the_device_has(monkeypatch):
    """MPS has no float64, and says so by a TypeError where one is made."""
    assert device.widest_float(torch.device("cpu")) == torch.float64

    def as_on_mps(*args, **options):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    monkeypatch.setattr(torch, "empty", as_on_mps)
    assert device.widest_float(torch.device("mps")) == torch.float32
