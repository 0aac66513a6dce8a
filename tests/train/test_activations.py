"""Activations that are computed again in part, or held by the host, give the bits of a run without."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distributed.harness import Sharded, compare, train
from distributed.two_devices import DEVICE, HOST, two_devices
from shardproof.errors import ConfigError
from shardproof.models.checkpointing import checkpointing_name, enable_checkpointing
from shardproof.train.model.activations import HeldByHost, choose_checkpointing
from zero.graphs import CASES as GRAPHS
from zero.language_models import CASES, texts, tiny

LAYERS = 3


class Counting(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def enabled(how: Any, reentrant: bool = False, family: str = "Qwen3") -> torch.nn.Module:
    model = tiny(family, attn_implementation="eager" if family == "GptOss" else "sdpa")
    if how:
        enable_checkpointing(choose_checkpointing(model, how), reentrant)
    return model.train()


def ran(how: Any) -> Counter[str]:
    """What one forward and backward pass of one process runs."""
    torch.manual_seed(0)
    model = enabled(how)
    with Counting() as mode:
        model(**texts(0, 2), labels=texts(0, 2)["input_ids"]).loss.backward()
    return mode.ran


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def test_selective_runs_products_and_attention_once_and_the_rest_again():
    no, yes, selective = ran(False), ran(True), ran("selective")
    assert yes["mm"] == no["mm"] + 7 * LAYERS - 1 * LAYERS  # all but the last of a layer, which backward does not need
    assert yes[ATTENTION] == no[ATTENTION] + LAYERS == 2 * LAYERS
    assert selective["mm"] == no["mm"]
    assert selective[ATTENTION] == no[ATTENTION]
    assert selective["silu"] == yes["silu"] == 2 * LAYERS


def test_a_number_computes_every_nth_layer_again():
    assert ran(2)[ATTENTION] == LAYERS + 2  # the first and the third
    assert ran(3)[ATTENTION] == LAYERS + 1
    assert ran(1) == ran(True)


def test_it_stays_so_when_it_is_turned_off_and_on_again():
    model = enabled(2)
    getattr(model, f"{checkpointing_name(model)}_disable")()
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)
    enable_checkpointing(model, False)
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False, True]


def test_a_model_whose_layers_cannot_be_told_apart_is_refused():
    class Old(torch.nn.Linear):
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
            pass

    with pytest.raises(ConfigError, match="cannot be identified"):
        choose_checkpointing(Old(1, 1), 2).gradient_checkpointing_enable()


def sharded(ways: list[tuple[Any, bool]], stage: int, family: str = "Qwen3") -> None:
    case = next(case for name, case in CASES.items() if case.rows is texts)
    records = []
    for how, reentrant in ways:
        alike = dataclasses.replace(case, build=partial(enabled, how, reentrant, family))
        records.append(train(alike, Sharded(stage)))
    for record in records[1:]:
        compare(records[0], record, tolerance=0)


WAYS = [(False, False), ("selective", False), (2, False), (2, True)]


def test_every_kind_gives_the_bits_of_the_run_without():
    sharded(WAYS, 3)


@pytest.mark.parametrize("stage", [0, 3])
def test_so_it_does_where_layers_convert_their_weights(stage):
    """Gemma's norms call `self.weight.float()`: computing again must run what the forward pass ran, nothing more."""
    sharded(WAYS[:2], stage, "Gemma")


def test_so_it_does_where_a_bias_is_added_into_the_product_of_experts():
    sharded(WAYS[:2], 3, "GptOss")


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_so_it_does_on_two_ranks(run2, stage):
    run2(sharded, WAYS, stage)


# --- held by the host -----------------------------------------------------------------------------


@contextlib.contextmanager
def holding(graph: str, **options: Any) -> Iterator[Any]:
    case = GRAPHS[graph]

    def step(*args: Any) -> Any:
        with HeldByHost(DEVICE, HOST, smallest=0):
            return case.step(*args)

    yield dataclasses.replace(case, step=step, options={**case.options, "device": DEVICE, **options})


def held(graphs: list[str], stage: int, **options: Any) -> None:
    for graph in graphs:
        usual = train(GRAPHS[graph], Sharded(stage))
        with holding(graph, **options) as case, two_devices() as mode:
            compare(usual, train(case, Sharded(stage)), tolerance=0)
        assert mode.crossings, graph


SOME = ["plain", "checkpoint_without_early_stop", "tied_embedding_and_head", "accumulation_with_no_sync"]


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_what_the_host_holds_comes_back_as_it_was(run2, stage):
    run2(held, SOME, stage)


def test_with_parameters_offloaded_too():
    held(SOME, 3, offload="all")


@pytest.mark.slow
def test_on_every_graph():
    left_out = {
        "edit_by_assigning_data",
        "activations_offloaded_by_saved_tensor_hooks",  # inside of these, where nothing is left to hold
        "torch_func_over_inputs",  # torch refuses any hooks there
        "gradients_of_each_row_by_torch_func",
        "checkpoint_selective",  # it counts operations, and what sees two devices cannot be hidden from it
        "derivatives_in_forward_mode",  # round otherwise between two devices made of one
        "norms_of_a_matrix",  # singular values, too, with nothing held
    }
    held([name for name in GRAPHS if name not in left_out], 3)


def test_a_tensor_that_is_saved_several_times_is_copied_once_and_an_edit_makes_it_another():
    x = torch.randn(4, 4)
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
    hooks = HeldByHost(torch.device("cpu"), smallest=0)
    with hooks:
        first = sum((x @ w).sum() for w in weights)
        assert len(hooks._held) == 1
        with torch.no_grad():
            x.mul_(2)
        second = (x @ weights[0]).sum()
        assert len(hooks._held) == 2
    assert not hooks._held
    torch.autograd.backward([first, second])
    expected = (x / 2).sum(0).unsqueeze(1).expand(4, 4)
    assert torch.equal(weights[1].grad, expected)
    assert torch.equal(weights[0].grad, 3 * expected)


def test_a_conjugate_is_another_tensor_than_what_lies_in_its_memory():
    grads = []
    for around in (contextlib.nullcontext(), HeldByHost(torch.device("cpu"), smallest=0)):
        torch.manual_seed(0)
        x = torch.randn(4, 4, dtype=torch.complex64)
        weights = [torch.randn(4, 4, dtype=torch.complex64, requires_grad=True) for _ in range(3)]
        with around:
            loss = sum(
                (value @ w).abs().sum() for value, w in zip((x, x.conj(), 1j * x.conj().imag), weights, strict=True)
            )
        loss.backward()
        grads.append([w.grad for w in weights])
    for plain, held_by_host in zip(*grads, strict=True):
        assert torch.equal(plain, held_by_host)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--tuner", "lora", "--lora-rank", "4"]], ids=["full", "lora"])
def test_runs_have_the_losses_of_the_one_without(commands, sft, more):
    kinds = {
        "no": [],
        "selective": ["selective"],
        "every second": ["2"],
        "reentrant": ["2", "--checkpointing-reentrant"],
    }
    plan = {
        name: sft("--nproc", "2", "--stage", "3", "--gradient-checkpointing", *(kind or ["no"]), *more)
        for name, kind in kinds.items()
    }
    plan["offloaded"] = sft("--nproc", "2", "--stage", "3", "--activation-offloading", *more)
    done = commands(list(plan.items()))
    assert all(run.code == 0 for run in done.values()), [run.output for run in done.values()]
    for run in done.values():
        assert run.series("loss") == pytest.approx(done["no"].series("loss"), abs=1e-5)


@pytest.mark.parametrize("how", [True, 2, "selective"])
def test_a_model_that_cannot_compute_again_is_refused_in_our_words(how: bool | int | str) -> None:
    """As Granite Speech: the run ended in transformers' words, on one of its ranks."""
    model = tiny("Qwen3Moe")
    model.supports_gradient_checkpointing = False  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="--gradient-checkpointing: a Qwen3MoeForCausalLM cannot recompute its"):
        enable_checkpointing(choose_checkpointing(model, how), reentrant=False)
