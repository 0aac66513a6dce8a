"""Each model of a trainer may have a stage and a precision of its own, or be sharded by whoever hands it over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.errors import ConfigError
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.rlhf.algorithms import check_algorithm

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
    from shardproof.train.rlhf import recipe as rlhf

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


def adapted(folder: str, lazily: bool, stage: int, as_computed: bool) -> tuple[list[float], dict[str, int]]:
    """Losses of adapters on a base, and bytes of frozen and of other weights on this rank."""
    import peft

    import shardproof
    from shardproof.integrations.prepared import hold_as_computed, shard_prepared
    from shardproof.integrations.pretrained import without_values

    base = without_values("LlamaForCausalLM", folder) if lazily else llama()
    torch.manual_seed(1)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    if as_computed:
        assert hold_as_computed(model, shardproof.MixedPrecision())
    shard_prepared(model, stage, shardproof.MixedPrecision(), torch.device("cpu"))
    optimizer, losses = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2), []
    ids = torch.arange(24).view(2, 12)
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    held = {"frozen": 0, "trained": 0}
    for flat in model.__dict__["_shardproof"].flats:
        held["trained" if any(flat.requires_grad) else "frozen"] += flat.shard.nbytes
    return losses, held


def in_both_dtypes(folder: str) -> list[Any]:
    cases = [(True, 0), (True, 3), (False, 3)]
    return [[adapted(folder, lazily, stage, kept) for kept in (False, True)] for lazily, stage in cases]


def test_what_is_frozen_may_lie_in_the_dtype_that_it_is_computed_with(run: Any, tmp_path: Path) -> None:
    """The same bits come out, and half of the memory is left; what is trained keeps its masters."""
    llama().save_pretrained(tmp_path)
    for case in run(2, in_both_dtypes, str(tmp_path))[0]:
        (losses, as_loaded), (same, held) = case
        assert same == losses
        assert losses[-1] < losses[0]
        assert held == {"frozen": as_loaded["frozen"] // 2, "trained": as_loaded["trained"]}


@pytest.mark.parametrize("lazily", [True, False])
def test_what_is_saved_is_kept_so_only_where_nothing_is_lost(tmp_path: Path, lazily: bool) -> None:
    import shardproof
    from shardproof.integrations.prepared import hold_as_computed
    from shardproof.integrations.pretrained import without_values
    from shardproof.models.loading.classes import with_values

    for name, stored in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        llama().to(stored).save_pretrained(tmp_path / name)
        how: Any = without_values if lazily else with_values
        loader: Any = type(llama())
        model = how(loader, str(tmp_path / name), dtype=torch.float32)
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)
        names = set(model.state_dict())
        assert not hold_as_computed(model, shardproof.MixedPrecision(compute=FP32), names)
        hold_as_computed(model, shardproof.MixedPrecision(), names)
        assert model.model.layers[0].self_attn.q_proj.weight.dtype == stored
        assert model.lm_head.weight.dtype == torch.float32
        shardproof.shard(model, 3, mixed_precision=shardproof.MixedPrecision())
        right = loader.from_pretrained(tmp_path / name, dtype=torch.float32).state_dict()
        for key, value in shardproof.full_state_dict(model).items():
            assert torch.equal(value.float(), right[key]), key


def test_what_peft_saves_of_a_base_keeps_its_digits() -> None:
    import peft

    import shardproof
    from shardproof.integrations.prepared import hold_as_computed
    from shardproof.integrations.saved import saved_names

    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]))
    assert hold_as_computed(model, shardproof.MixedPrecision(), saved_names(model))
    dtypes = {name.removeprefix("base_model.model.model."): p.dtype for name, p in model.named_parameters()}
    assert dtypes["embed_tokens.base_layer.weight"] == FP32
    assert dtypes["layers.0.self_attn.q_proj.base_layer.weight"] == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rlhf_type": "orpo", "model_stages": {"ref_model": 0}}, "orpo has no other model"),
        ({"model_stages": {"reward_model": 0}}, "dpo has ref_model"),
        ({"model_stages": {"ref_model": 0}, "tuner": "lora"}, "the reference is the model without adapters"),
        ({"rlhf_type": "grpo", "model_precisions": {"reward_model": "bf16"}}, "reward_model=bf16 needs --reward-model"),
        ({"rlhf_type": "ppo", "model_precisions": {"value_model": "fp16"}}, "--precision fp16"),
        (
            {"model_offloads": {"teacher_model": "all"}},
            "teacher_model=all: --rlhf-type dpo has ref_model",
        ),
        ({"model_offloads": {"ref_model": "optimizer"}}, "it is not trained and has no optimizer"),
        ({"model_offloads": {"ref_model": "host"}}, "--model-offloads ref_model=host must be optimizer, all or nvme"),
    ],
)
def test_a_model_that_does_not_take_part_has_none(options: dict[str, Any], text: str) -> None:
    config = RlhfConfig(
        **({"reward_funcs": ["length"]} if options.get("rlhf_type") in ("grpo", "ppo") else {}), **options
    )
    with pytest.raises(ConfigError, match=text):
        check_algorithm(config, config.batch(1))
