"""--liger-kernel: what Liger puts in place of a model's own kernels computes with whole parameters, at every stage.

Its kernels are for GPUs. Triton interprets that of the loss on a CPU, which shows what the engine has to do with it: it
multiplies with the weight of the head, outside of the head's own forward. That of the norms is not understood.
"""

from __future__ import annotations

import os

import pytest
import torch

import shardproof
from shardproof.cli.main import main
from shardproof.errors import ConfigError
from shardproof.train.options.config import SftConfig
from shardproof.train.sft import recipe as sft
from zero.language_models import texts, tiny


def build(tied: bool) -> torch.nn.Module:
    os.environ["TRITON_INTERPRET"] = "1"
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    torch.manual_seed(0)
    model = tiny("Qwen2", use_cache=False, num_hidden_layers=2, tie_word_embeddings=tied)
    _apply_liger_kernel_to_instance(model, rope=False, rms_norm=False, swiglu=False)
    return model.train()


def same(stage: int, tied: bool) -> None:
    plain, model = build(tied), shardproof.shard(build(tied), stage)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(3):
        batch = texts(step, 2)
        outputs = [m(**batch, labels=batch["input_ids"]) for m in (plain, model)]
        assert all(output.logits is None for output in outputs)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(outputs[1].loss, outputs[0].loss, rtol=1e-6, atol=0)
    state = shardproof.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # interpreted
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_its_loss_on_two_ranks_is_that_of_one_process(run2, stage, tied):
    pytest.importorskip("liger_kernel", reason="pip install 'shardproof[liger]'")
    run2(same, stage, tied)


def test_it_is_not_taken_without_its_package(monkeypatch, capsys):
    monkeypatch.setattr(sft.importlib.util, "find_spec", lambda name: None)
    assert main(["sft", "--liger-kernel", "--nproc", "1"]) == 2
    assert "pip install 'shardproof[liger]'" in capsys.readouterr().err


def test_it_and_a_loss_in_chunks_are_two_ways_to_the_same(monkeypatch):
    monkeypatch.setattr(sft.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match="leave --chunked-loss out"):
        sft.check(SftConfig(liger_kernel=True, chunked_loss=True), 1)
