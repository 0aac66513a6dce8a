"""--fp8: products in eight bits, on weights that ranks hold slices of."""

from __future__ import annotations

import pytest
import torch

import shardproof
from shardproof.errors import ConfigError
from shardproof.models.checkpointing import enable_checkpointing
from shardproof.train.model import fp8
from shardproof.train.model.fp8 import in_fp8
from zero.language_models import texts, tiny

NEEDS = "pip install 'shardproof[fp8]'"


def build(checkpointed: bool, eight: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "intermediate_size": 32, "num_key_value_heads": 2}  # multiples of 16
    model = tiny("Qwen3", use_cache=False, **sizes).bfloat16()
    if checkpointed:
        enable_checkpointing(model, False)
    if eight:
        assert in_fp8(model) == 2 * 7
    return model.train()


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    batch = texts(step, 2)
    return model(**batch, labels=batch["input_ids"]).loss


def same(stage: int, checkpointed: bool) -> None:
    """Both ranks take the same rows, so that tensors are scaled alike, and sums of two gradients are exact."""
    plain, model = build(checkpointed, True), shardproof.shard(build(checkpointed, True), stage)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(3):
        losses = [loss_of(m, step) for m in (plain, model)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[0].equal(losses[1])
    state = shardproof.full_state_dict(model, rank0_only=False)
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


@pytest.mark.slow  # torchao takes long to import, on every rank
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_two_ranks_train_as_one_process(run2, stage, checkpointed):
    pytest.importorskip("torchao", reason=NEEDS)
    run2(same, stage, checkpointed)


def test_products_are_in_fp8_and_close_to_those_in_bf16():
    pytest.importorskip("torchao", reason=NEEDS)
    losses = []
    for eight in (False, True):
        model = shardproof.shard(build(False, eight), 3)
        with torch.profiler.profile() as profiler:
            loss = loss_of(model, 0)
            loss.backward()
        kinds = {event.key for event in profiler.key_averages()}
        assert ("aten::_scaled_mm" in kinds) == eight
        losses.append(float(loss.detach()))
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=2e-2)


def test_a_device_that_cannot_is_told(monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0\nmore")

    monkeypatch.setattr(fp8.torch, "_scaled_mm", fails)
    with pytest.raises(
        ConfigError, match=r"--fp8: torch cannot multiply in fp8 on this cpu \(torch._scaled_mm is only"
    ):
        fp8.check_fp8(torch.device("cpu"))


def test_a_model_without_such_layers_is_refused():
    pytest.importorskip("torchao", reason=NEEDS)
    with pytest.raises(ConfigError, match="has no blocks with linear layers"):
        in_fp8(torch.nn.Sequential(torch.nn.Linear(16, 16)))


@pytest.mark.slow
def test_a_run_on_two_processes_has_the_losses_of_one(commands, sft):
    pytest.importorskip("torchao", reason=NEEDS)
    eight = [
        "--precision",
        "bf16",
        "--fp8",
        "--max-steps",
        "2",
    ]  # CPUs without such instructions take half a minute a step
    done = commands(
        [
            ("bf16", sft("--stage", "0", "--nproc", "1", *eight[:2], *eight[3:])),
            ("one", sft("--stage", "0", "--nproc", "1", *eight)),
            ("two", sft("--stage", "3", "--nproc", "2", *eight)),
        ]
    )
    assert all(run.code == 0 for run in done.values()), [run.output for run in done.values()]
    losses = {name: run.series("loss") for name, run in done.items()}
    assert losses["two"] == pytest.approx(losses["one"], abs=0.02)
    assert losses["one"] == pytest.approx(losses["bf16"], abs=0.05)
    assert losses["one"] != losses["bf16"]
