"""Promise: what is kept at home gives the numbers of a run without, and computing never meets what lies there."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import mmap
import tempfile
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardproof
from distributed.harness import Case, Sharded, compare, parity, train
from distributed.two_devices import DEVICE, HOST, Mixed, two_devices
from shardproof.errors import EngineError
from shardproof.zero.schedule.home import Home, home_of
from zero import test_dynamic
from zero.graphs import CASES
from zero.models import FEATURES, Net
from zero.test_owners import OPTIMIZERS
from zero.test_steps import FromTheStart

# The test compares devices by index, which torch forgets: a value that was computed from `p` looks to be elsewhere.
NOT_TOLD_APART = {"edit_by_assigning_data", "transforms_over_detached_parameters"}
# The mode of these tests makes the first round otherwise, and the second count what the engine does, hidden else.
OTHERWISE_UNDER_A_MODE = {"derivatives_in_forward_mode", "checkpoint_selective"}


def with_offload(graph: str, offload: str | None, **options: Any) -> Case:
    case = CASES[graph]
    return dataclasses.replace(case, options={**case.options, "offload": offload, **options})


# --- two devices ----------------------------------------------------------------------------------


def test_the_two_devices_of_these_tests_do_not_mix():
    with two_devices() as mode, pytest.raises(Mixed):
        here, there = torch.ones(2, device=DEVICE), torch.ones(2, device=HOST)
        assert (here + there.to(DEVICE)).sum() == 4
        assert mode.crossings == 1
        here + there


def apart(graphs: list[str], stage: int, offload: str, **options: Any) -> None:
    for graph in graphs:
        with two_devices():  # a mode takes some kernels in other pieces, and so other bits
            usual = train(with_offload(graph, None, device=DEVICE, **options), Sharded(stage))
        with two_devices() as mode:
            compare(usual, train(with_offload(graph, offload, device=DEVICE, **options), Sharded(stage)), tolerance=0)
        assert mode.crossings, graph


# Wherever a shard or its gradient is looked at: edits, norms, hooks, graphs of gradients, state that is loaded.
SHORT = [
    "tied_embedding_and_head",
    "accumulation_with_no_sync",
    "edit_by_masks_and_foreach",
    "edit_rows_through_data",
    "edit_through_whole_with_writeback",
    "optimizer_state_saved_and_loaded_between_steps",
    "backward_with_create_graph",
]


@pytest.mark.parametrize("offload", ["optimizer", "all"])
@pytest.mark.parametrize(
    "graphs",
    [
        pytest.param(SHORT, id="some"),
        pytest.param(sorted({*CASES} - NOT_TOLD_APART - OTHERWISE_UNDER_A_MODE), id="all", marks=pytest.mark.slow),
    ],
)
def test_graphs_give_the_same_bits_on_two_devices(graphs, offload):
    apart(graphs, 3, offload)


SOME = ["plain", "accumulation_with_no_sync"]


@pytest.mark.sampled
@pytest.mark.parametrize("offload", ["optimizer", "all"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_give_the_same_bits_on_two_devices(run2, stage, offload):
    run2(apart, SOME, stage, offload)


def matrices(stage: int) -> None:
    case = dataclasses.replace(CASES["plain"], optimizer=OPTIMIZERS["adafactor"], clip=None)
    usual = train(case, Sharded(stage))
    with two_devices():
        options = {"offload": "optimizer", "device": DEVICE, "mixed_precision": None}
        compare(usual, train(dataclasses.replace(case, options=options), Sharded(stage)), tolerance=0)


def test_owners_of_whole_matrices_update_them_at_home(run2):
    run2(matrices, 3)


def on_different_paths(offload: str) -> None:
    """A rank lends its slices from where they lie."""
    results = []
    for options in ({}, {"offload": offload, "device": DEVICE}):
        torch.manual_seed(0)
        with two_devices():
            model = shardproof.shard(test_dynamic.Omni(), 3, **options)
            norms = test_dynamic.train(model, [dist.get_rank()], 1.0)
        results.append((norms, shardproof.full_state_dict(model, rank0_only=False)))
    (norms, weights), (got_norms, got) = results
    assert got_norms == norms
    assert all(torch.equal(got[name], value) for name, value in weights.items())


@pytest.mark.parametrize("offload", ["optimizer", pytest.param("all", marks=pytest.mark.slow)])
def test_ranks_on_different_paths(run2, offload):
    run2(on_different_paths, offload)


def wire_and_device(offload: str | None) -> tuple[int, int]:
    """Bytes gathered in a step, and bytes of shards that stay on the device."""
    with two_devices():
        model = shardproof.shard(Net(), 3, device=DEVICE, offload=offload, mixed_precision=torch.bfloat16)
        model.blocks[0].requires_grad_(False)
        model(torch.ones(2, FEATURES, device=DEVICE)).float().square().mean().backward()
        stats = shardproof.stats(model).total
        return stats.bytes_gathered, stats.shard_bytes


def crossed(offload: str, precision: torch.dtype | None) -> Counter[Any]:
    """What a step of two micro-batches casts at home, and what it brings, by dtype."""
    found: Counter[Any] = Counter()
    bring, cast = Home.bring, Home.cast

    def seen(self: Home, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        found[values.dtype] += 1
        return bring(self, values, dtype)

    def made(self: Home, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        result = cast(self, values, dtype)
        found["cast"] += result is not values
        return result

    with two_devices() as mode, mock.patch.multiple(Home, bring=seen, cast=made):
        model = shardproof.shard(Deep(), 3, device=DEVICE, offload=offload, mixed_precision=precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(3):
            found.clear()
            for _ in range(2):
                model(torch.ones(1, 64, device=DEVICE)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        sources = [flat.source[1] for flat in model.__dict__["_shardproof"].flats if flat.source is not None]
        assert {mode.place_of(source) for source in sources} == {HOST.index}
    return found


def test_what_is_gathered_several_times_in_a_step_is_cast_once_and_crosses_in_the_dtype_of_computing():
    half, whole = crossed("all", torch.bfloat16), crossed("all", None)
    assert half["cast"] == 12
    assert half[torch.bfloat16] == whole[torch.float32] > 3 * 12
    assert half[torch.float32] == whole["cast"] == 0


@pytest.mark.sampled
@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_in_bf16_two_devices_give_the_same_bits(run2, offload):
    run2(apart, SOME, 3, offload, mixed_precision=torch.bfloat16)


def test_the_host_rounds_to_the_nearest_and_of_two_to_the_even_one():
    """As accelerators do (tests/gpu), so that it makes no difference who casts. Subnormal numbers are among these."""
    bits = torch.cat([torch.randint(-(2**31), 2**31, (2**20,)), torch.arange(0, 2**24, 2**5)]).int()
    ties = bits & -(2**16) | 2**15
    for values in (bits, ties, ties - 1, ties + 1):
        cast = values.view(torch.float32).bfloat16()
        wide = values.long() & 0xFFFFFFFF
        rounded = (wide + 0x7FFF + (wide >> 16 & 1)) >> 16
        real = ~values.view(torch.float32).isnan()
        assert torch.equal((cast.view(torch.int16).long() & 0xFFFF)[real], (rounded & 0xFFFF)[real])


def test_as_much_is_gathered_as_without(run2):
    assert run2(wire_and_device, None)[0][0] == run2(wire_and_device, "all")[0][0]


def test_state_that_was_loaded_lies_at_home(tmp_path):
    """It may be more than the device can hold, from the first moment on."""
    for load in (False, True):
        with two_devices() as mode:
            model = shardproof.shard(Net(), 3, device=DEVICE, offload="optimizer")
            optimizer = torch.optim.AdamW(model.parameters())
            if load:
                shardproof.load(model, optimizer, tmp_path / "saved")
                state = [v for p in model.parameters() for v in optimizer.state[p].values() if v.dim()]
                assert {mode.place_of(value) for value in state} == {HOST.index}
            model(torch.ones(2, FEATURES, device=DEVICE)).square().mean().backward()
            optimizer.step()
            if not load:
                shardproof.save(model, optimizer, tmp_path / "saved", asynchronous=False)


def test_state_from_before_a_step_goes_home():
    """That of the start, and what torch has loaded to where parameters compute."""
    with two_devices() as mode:
        model = shardproof.shard(Net(), 3, device=DEVICE, offload="optimizer")
        optimizer = FromTheStart(model.parameters())
        for step in range(2):
            model(torch.ones(2, FEATURES, device=DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for state in optimizer.state.values():
                assert (state["steps"], mode.place_of(state["mu"])) == (step + 1, HOST.index)
            optimizer.load_state_dict(optimizer.state_dict())


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_one_process_has_few_units_of_a_larger_model_on_its_device(precision):
    """There is nobody to gather from but the host."""
    torch.manual_seed(0)
    plain, held = Deep(), []
    model = copy.deepcopy(plain)
    with two_devices() as mode:
        shardproof.shard(model, 3, device=DEVICE, offload="all", mixed_precision=precision)

        def look(*_: Any) -> None:
            here = (storage for storage, place in mode.places.items() if place == DEVICE.index)
            held.append(sum(storage.nbytes() for storage in here))

        for block in model.blocks:
            block.register_forward_hook(lambda *call: (look(), call[-1].register_hook(look))[0])
        optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (model, plain)]
        for _ in range(3):
            for m, optimizer in zip((model, plain), optimizers, strict=True):
                m(torch.ones(1, 64, device=DEVICE if m is model else None)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert len(held) == 3 * 2 * 12
        block = 4 * 64 * 65
        assert max(held) < 5 * block  # two in use, a gradient as autograd gives it and as it is reduced, activations
        state = shardproof.full_state_dict(model)
    close = {"rtol": 1e-5, "atol": 1e-6} if precision is None else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(state, dict(plain.state_dict()), **close)
    assert shardproof.stats(model).total.prefetch_hits > 0


# --- files ----------------------------------------------------------------------------------------


def in_files(graph: str, stage: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        parity(graph, with_offload(graph, f"nvme:{folder}"), Sharded(stage))


@pytest.mark.sampled
@pytest.mark.parametrize("graph", ["a_parameter_used_only_now_and_then", *SOME])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_with_files_equal_one_process(run2, graph, stage):
    run2(in_files, graph, stage)


def bits(graph: str, stage: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        compare(train(CASES[graph], Sharded(stage)), train(with_offload(graph, f"nvme:{folder}"), Sharded(stage)), 0)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_every_graph_gives_the_same_bits_with_files(stage):
    for graph in CASES:
        bits(graph, stage)


def looked_at_before(offload: str | None) -> Any:
    torch.manual_seed(0)
    model = shardproof.shard(Net(), 3, offload=offload, mixed_precision=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with torch.inference_mode():
            model(torch.ones(2, FEATURES))
        model(torch.ones(2, FEATURES)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return shardproof.full_state_dict(model, rank0_only=False)


def cast_in_inference_mode() -> None:
    with tempfile.TemporaryDirectory() as folder:
        got = looked_at_before(f"nvme:{folder}")
    assert all(torch.equal(got[name], value) for name, value in looked_at_before(None).items())


def test_what_was_cast_in_inference_mode_serves_training(run2):
    run2(cast_in_inference_mode)


def mapped() -> set[tuple[int, int]]:
    """The address ranges of files of this process that have no name any more."""
    with open("/proc/self/maps") as lines:
        parts = [line.split() for line in lines if "(deleted)" in line]
    return {(int(low, 16), int(high, 16)) for low, high in (part[0].split("-") for part in parts)}


def lies_in_files(stage: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = shardproof.shard(Net(), stage, offload=f"nvme:{folder}")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, FEATURES)).square().mean().backward()
            optimizer.step()
        files = mapped()
        flats = model.__dict__["_shardproof"].flats
        state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
        for tensor in [*(f.shard for f in flats), *(f.grad for f in flats), *(v for v in state if v.numel())]:
            assert any(low <= tensor.data_ptr() < high for low, high in files)
        assert state


@pytest.mark.parametrize("stage", [0, 3])
def test_masters_gradients_and_state_lie_in_files_without_names(run2, stage):
    run2(lies_in_files, stage)


def resident(address: int) -> int:
    """Bytes of the mapping at an address that are in the memory of this process."""
    with open("/proc/self/smaps") as lines:
        found = False
        for line in lines:
            first = line.split()[0]
            if "-" in first:
                low, high = (int(part, 16) for part in first.split("-"))
                found = low <= address < high
            elif found and first == "Rss:":
                return 1024 * int(line.split()[1])
    raise AssertionError("no such mapping")


def test_what_is_expected_is_read_by_a_thread(tmp_path):
    home = home_of(f"nvme:{tmp_path}", torch.device("cpu"))
    values = home.take(1 << 20, torch.float32).fill_(2.0)
    address, size = values.data_ptr(), values.nbytes
    assert ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_DONTNEED) == 0
    assert resident(address) == 0
    home.expect(values)
    for part in home._expected:
        part.result(timeout=60)
    assert resident(address) == size
    assert values.eq(2.0).all()


def read_ahead(stage: int) -> None:
    """Of a model that runs its blocks one after the other each is expected before it is used."""
    with tempfile.TemporaryDirectory() as folder:
        model = shardproof.shard(Deep(), stage, offload=f"nvme:{folder}", mixed_precision=torch.bfloat16)
        engine, asked = model.__dict__["_shardproof"], []
        expect = engine.home.expect
        engine.home.expect = lambda values: (asked.append(values.data_ptr()), expect(values))
        for step in range(3):
            model(torch.ones(1, 64)).float().square().mean().backward()
            if step:  # what was cast in the first pass is what the next ones read
                assert {flat.source[1].data_ptr() for flat in engine.flats[-10:]} <= set(asked)


def test_the_engine_expects_the_block_after_the_next(run2):
    run2(read_ahead, 3)


def saved_and_loaded(stage: int) -> None:
    """State dicts and checkpoints are those of a run without."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = shardproof.shard(Net(), stage, offload=f"nvme:{folder}")
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, FEATURES)).square().mean().backward()
        optimizer.step()
        kept = optimizer.state_dict()
        other = torch.optim.AdamW(model.parameters())
        other.load_state_dict(kept)
        assert all(torch.equal(a, b) for a, b in zip(_tensors(kept), _tensors(other.state_dict()), strict=True))
        values = shardproof.full_state_dict(model, rank0_only=False)
        shardproof.load_full_state_dict(model, {name: value + 1 for name, value in values.items()})
        for name, value in shardproof.full_state_dict(model, rank0_only=False).items():
            assert torch.equal(value, values[name] + 1)


def _tensors(state_dict: dict[str, Any]) -> list[torch.Tensor]:
    return [v for state in state_dict["state"].values() for v in state.values() if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_saved_is_that_of_a_run_without(run2, stage):
    run2(saved_and_loaded, stage)


@pytest.mark.parametrize(
    "offload, text",
    [
        ("cpu", "offload='cpu' is not one of 'optimizer', 'all', 'nvme:FOLDER'"),
        ("nvme:", "offload='nvme:' is not one of"),
        ("nvme:/not/here", "cannot be kept there (No such file or directory)"),
        (True, "offload=True is not one of"),
    ],
)
def test_an_offload_that_cannot_be_is_refused(offload, text):
    with pytest.raises(EngineError) as caught:
        shardproof.shard(Net(), 3, offload=offload)
    assert text in str(caught.value)


def test_on_the_cpu_memory_of_the_host_is_home_anyway():
    assert home_of("optimizer", torch.device("cpu")) is home_of("all", torch.device("cpu")) is None
