"""Each model of a trainer may have a stage and a precision of its own, or be sharded by whoever hands it over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.errors import ConfigError
from shardproof.train.algorithms import check_algorithm
from shardproof.train.rlhf_config import RlhfConfig

FP32 = torch.float32


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=67, num_key_value_heads=2, **sizes))


def as_wanted(folder: str) -> list[tuple[int, Any]]:
    """Stage and compute dtype of models that the trainer would shard at stage 3 in bf16."""
    import shardproof
    from shardproof.integrations.prepared import shard_as, shard_prepared
    from shardproof.train import rlhf

    bf16, fp32 = shardproof.MixedPrecision(), shardproof.MixedPrecision(compute=FP32)
    model = llama()
    model.save_pretrained(folder)
    config = RlhfConfig(model_stages={"ref_model": 0}, model_precisions={"ref_model": "fp32"})
    models = [
        llama(),
        shard_as(llama(), stage=1),
        shard_as(llama(), mixed_precision=fp32),
        rlhf._load_other("ref_model", folder, config),
        rlhf._load_other("reward_model", folder, config),
        shardproof.shard(model, 2, mixed_precision=fp32),
    ]
    return [
        (engine.stage, engine.precision.compute)
        for m in models
        if (engine := shard_prepared(m, 3, bf16, torch.device("cpu")).__dict__["_shardproof"])
    ]


def test_each_has_the_stage_and_precision_that_were_wanted(run: Any, tmp_path: Path) -> None:
    (found,) = run(1, as_wanted, str(tmp_path))
    bf16 = torch.bfloat16
    assert found == [(3, bf16), (1, bf16), (3, FP32), (0, FP32), (3, bf16), (2, FP32)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rlhf_type": "orpo", "model_stages": {"ref_model": 0}}, "orpo has no other model"),
        ({"model_stages": {"reward_model": 0}}, "dpo has ref_model"),
        ({"model_stages": {"ref_model": 0}, "tuner": "lora"}, "the reference is the model without adapters"),
        ({"rlhf_type": "grpo", "model_precisions": {"reward_model": "bf16"}}, "there is no --reward-model"),
        ({"rlhf_type": "ppo", "model_precisions": {"value_model": "fp16"}}, "--precision fp16"),
    ],
)
def test_a_model_that_does_not_take_part_has_none(options: dict[str, Any], text: str) -> None:
    config = RlhfConfig(
        **({"reward_funcs": ["length"]} if options.get("rlhf_type") in ("grpo", "ppo") else {}), **options
    )
    with pytest.raises(ConfigError, match=text):
        check_algorithm(config, config.batch(1))
