"""Promise: a DeepSpeed JSON behind --deepspeed decides what it decides there, or is refused by the name of the key."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardproof.cli import sft
from shardproof.errors import ConfigError
from shardproof.train.options.config import SftConfig


def parsed(raw: dict[str, Any], *more: str) -> SftConfig:
    return sft.parse(["--deepspeed", json.dumps(raw), *more])[0]


def test_what_a_file_decides() -> None:
    config = parsed(
        {
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": True},
            "gradient_clipping": 0.1,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 3,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 0.2},
            },
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "total_num_steps": "auto",
                    "warmup_num_steps": 7,
                    "warmup_type": "linear",
                    "warmup_max_lr": 3e-4,
                },
            },
        }
    )
    assert (config.stage, config.precision, config.max_grad_norm) == (2, "bf16", 0.1)
    assert (config.per_device_batch_size, config.gradient_accumulation_steps) == (4, 3)
    assert (config.learning_rate, config.weight_decay) == (3e-4, 0.2)
    assert (config.adam_beta1, config.adam_beta2, config.adam_epsilon) == (0.9, 0.95, 1e-7)
    assert (config.lr_scheduler, config.warmup_steps) == ("linear", 7)


def test_auto_is_what_the_options_say() -> None:
    raw = {
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
    }
    given = ["--weight-decay", "0.3", "--precision", "bf16", "--max-grad-norm", "2"]
    assert parsed(raw, *given) == sft.parse(["--stage", "3", *given])[0]


def test_fp16_scales_the_loss_its_own_way(capfd: pytest.CaptureFixture[str]) -> None:
    assert parsed({"fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}}).precision == "fp16"
    assert "fp16.hysteresis" in capfd.readouterr().err


def test_the_dtype_in_which_gradients_are_added(capfd: pytest.CaptureFixture[str]) -> None:
    half = {"bf16": {"enabled": True}, "communication_data_type": "bf16"}
    assert parsed(half).reduce_dtype == "bf16"
    assert parsed(half | {"communication_data_type": "fp32"}).reduce_dtype == "fp32"
    assert capfd.readouterr().err == ""
    assert parsed(half | {"communication_data_type": "fp16"}).reduce_dtype == "fp32"
    assert "communication_data_type" in capfd.readouterr().err


def test_a_file_and_an_option_may_agree_and_not_differ() -> None:
    assert parsed({"gradient_clipping": 0.5}, "--max_grad_norm", "5e-1").max_grad_norm == 0.5
    with pytest.raises(
        ConfigError, match=r"--max-grad-norm has two values: --deepspeed says 0.5, --max-grad-norm says 1"
    ):
        parsed({"gradient_clipping": 0.5}, "--max_grad_norm", "1")


def test_what_has_no_meaning_here_is_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    parsed(
        {"zero_optimization": {"stage": 1, "overlap_comm": True}, "wall_clock_breakdown": True, "steps_per_print": 10}
    )
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("zero_optimization.overlap_comm, wall_clock_breakdown, steps_per_print")


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale: the commands support dynamic scaling only"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast is not supported"),
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation is unknown; did you mean zero_optimization?"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "device is nvme, but nvme_path is missing"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel is not supported"),
        ({"optimizer": {"type": "SGD", "params": {"lr": 1}}}, "optimizer.type SGD is not AdamW"),
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, "Did you mean lr?"),
        ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, "amsgrad is not an option"),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "scheduler.type OneCycle has no equivalent"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}, "warmup_type is 'log'"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}}, "Did you mean warmup_num_steps?"),
    ],
)
def test_what_the_commands_do_not_have_is_refused(raw: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(raw)
    assert text in str(caught.value)
