"""A DeepSpeed JSON is read, worked out and checked; what has no meaning here is named, what is unknown is refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardproof.errors import ConfigError
from shardproof.integrations.deepspeed import config, optimizers
from shardproof.integrations.deepspeed.sections import Named

# What people run: the file of the Trainer's documentation for ZeRO-3, with its "auto" values filled in where a loop
# must know them.
ZERO3 = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 100},
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "wall_clock_breakdown": False,
}


def refusal(raw: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config.read(raw)
    return str(caught.value)


def test_a_common_file_is_read() -> None:
    """ "auto" is as good as not given; only what is set and has no meaning here is named."""
    settings, unused = config.read(ZERO3)
    assert settings.zero_optimization.stage == 3
    assert (settings.bf16.enabled, settings.fp16.enabled) == (True, False)
    assert settings.gradient_clipping == 1.0
    assert config.batch(settings, 2) == config.Batch(8, 4, 1)
    assert unused == [
        f"zero_optimization.{key}"
        for key in (
            "overlap_comm",
            "contiguous_gradients",
            "sub_group_size",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
        )
    ]


def test_a_file_a_text_and_a_dict_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(ZERO3))
    text = base64.urlsafe_b64encode(json.dumps(ZERO3).encode()).decode()
    assert config.read(ZERO3) == config.read(file) == config.read(str(file)) == config.read(text)


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        ({"train_batch_size": 16}, 2, (16, 8, 1)),
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}, 2, (16, 2, 4)),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 2}, 4, (16, 2, 2)),
        ({"train_micro_batch_size_per_gpu": 3}, 2, (6, 3, 1)),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}, 2, (30, 3, 5)),
    ],
)
def test_batch_sizes_are_worked_out(given: dict[str, int], ranks: int, expected: tuple[int, int, int]) -> None:
    assert config.batch(config.read(given)[0], ranks) == config.Batch(*expected)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "gives neither train_batch_size nor"),
        ({"gradient_accumulation_steps": 2}, "gives neither train_batch_size nor"),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, "10 is not train_micro_batch_size"),
        ({"train_batch_size": 1}, "1 is too small for 2 ranks"),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8}, "8 is too small for 2 ranks with train_micro"),
    ],
)
def test_batch_sizes_that_cannot_be(given: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config.batch(config.read(given)[0], 2)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"train_batchsize": 8}, "train_batchsize is unknown; did you mean train_batch_size?"),
        ({"zero_optimization": {"stages": 3}}, "did you mean zero_optimization.stage?"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: Input should be less than or equal to 3"),
        ({"zero_optimization": {"stage": "three"}}, "zero_optimization.stage: Input should be a valid integer"),
        ({"gradient_clipping": True}, "must be a number, not true or false"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16 and bf16 are both enabled"),
        ({"bf16": {"enable": True}}, "did you mean bf16.enabled?"),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, "fp16.loss_scale"),
        ({"gradient_allreduce_op": "sum"}, "'sum' is not supported"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel is not supported"),
        ({"amp": {"enabled": True}}, "use bf16 or fp16"),
        ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, "did you mean zero_optimization.offload"),
        ({"optimizer": {"name": "AdamW"}}, "optimizer.name is unknown"),
        (7, "a dict or the path of a JSON file"),
        ("nowhere.json", "There is no DeepSpeed configuration at nowhere.json"),
    ],
)
def test_what_is_wrong_is_said(raw: Any, text: str) -> None:
    assert text in refusal(raw)


def test_all_mistakes_are_told_at_once() -> None:
    text = refusal({"train_batchsize": 8, "zero_optimization": {"stagee": 1}})
    assert "train_batchsize" in text
    assert "zero_optimization.stagee" in text


def test_what_asks_for_nothing_is_not_refused() -> None:
    """Sections that are switched off are ordinary."""
    raw = {
        "train_batch_size": 8,
        "gradient_allreduce_op": "mean",
        "tensor_parallel": {"autotp_size": 0},
        "elasticity": {"enabled": False, "max_train_batch_size": 2000},
        "flops_profiler": {"enabled": False, "profile_step": 1},
        "sequence_parallel_size": 1,
        "zero_optimization": {"offload_optimizer": {"device": "none", "pin_memory": True}},
    }
    settings, unused = config.read(raw)
    assert (settings.zero_optimization.offload(), unused) == (None, [])


def test_not_json(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{\n  "train_batch_size": 8\n  "fp16": {}}')
    assert "ds.json:3: not JSON" in refusal(file)
    file.write_text('{"train_batch_size": 8, "train_batch_size": 16}')
    assert "'train_batch_size' twice" in refusal(file)


# --- optimizers -------------------------------------------------------------------------------------


def made(kind: str, **params: Any) -> torch.optim.Optimizer:
    return optimizers.make(Named(type=kind, params=params), [nn.Parameter(torch.ones(2))])


def test_optimizers_are_torchs_with_deepspeeds_defaults() -> None:
    """DeepSpeed's Adam decouples weight decay, and decays nothing by default; `torch_adam` has torch's defaults."""
    adam = made("Adam", lr=1e-3, bias_correction=True)
    assert (type(adam), adam.defaults["weight_decay"]) == (torch.optim.AdamW, 0.0)
    assert type(made("adam", adam_w_mode=False)) is torch.optim.Adam
    assert made("AdamW", torch_adam=True).defaults["weight_decay"] == 0.01
    assert made("AdamW", betas=[0.8, 0.9]).defaults["betas"] == (0.8, 0.9)
    assert made("AdamW", betas="auto").defaults["betas"] == (0.9, 0.999)
    assert type(made("SGD", lr=0.1, momentum=0.9)) is torch.optim.SGD
    assert type(made("Adagrad")) is torch.optim.Adagrad


@pytest.mark.parametrize(
    ("kind", "params", "text"),
    [
        ("AdamX", {}, "Did you mean Adam"),
        ("Lamb", {}, "needs whole parameters"),
        ("OneBitAdam", {}, "compresses gradients"),
        ("AdamW", {"lr": "auto"}, "which a Trainer fills in"),
        ("AdamW", {"learning_rate": 1e-3}, "learning_rate is not an argument of AdamW. Did you mean lr?"),
        ("AdamW", {"max_grad_norm": 1.0}, "set gradient_clipping"),
        ("AdamW", {"lr": -1.0}, "Invalid learning rate"),
    ],
)
def test_optimizers_that_cannot_be(kind: str, params: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        made(kind, **params)


# --- offload ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "offload"),
    [
        ({}, None),
        ({"offload_optimizer": {"device": "none", "nvme_path": "/nvme"}}, None),
        ({"offload_optimizer": {"device": "cpu", "pin_memory": True}}, "optimizer"),
        ({"cpu_offload": True}, "optimizer"),
        ({"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}, "all"),
        ({"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "nvme", "nvme_path": "/a"}}, "nvme:/a"),
    ],
)
def test_what_the_file_wants_elsewhere(zero: dict[str, Any], offload: str | None) -> None:
    settings, unused = config.read({"zero_optimization": {"stage": 3, **zero}, "train_batch_size": 2})
    assert (settings.zero_optimization.offload(), unused) == (offload, [])


def test_nvme_needs_a_path() -> None:
    settings, _ = config.read({"zero_optimization": {"offload_param": {"device": "nvme"}}, "train_batch_size": 2})
    with pytest.raises(ConfigError, match="offload_param: device is nvme, but nvme_path is missing"):
        settings.zero_optimization.offload()
