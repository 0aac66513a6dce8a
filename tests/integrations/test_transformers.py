"""Saving under the Trainer's mixin: of a PEFT model, nothing but what is saved is gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn


def peft_model(save: list[str] | None) -> nn.Module:
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=save, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def save_adapters(save: list[str] | None) -> tuple[bool, int, int]:
    """Whether what is saved has the right names and values, elements gathered for it, and elements it has."""
    from peft import get_peft_model_state_dict

    import shardproof
    from shardproof.integrations.saved import pick_adapters, saved_names, state_dict_of
    from shardproof.zero.comm.collectives import Collectives

    model = peft_model(save)
    expected = {name: value.clone() for name, value in get_peft_model_state_dict(model).items()}
    names = saved_names(model)
    shardproof.shard(model, 3)
    gathered, ours = 0, next(model.parameters()).flat.engine.comm
    original = Collectives.gather

    def counted(self: Any, whole: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal gathered
        if self is ours:  # a model that an earlier test has left may owe other ranks a gather
            gathered += whole.numel()
        return original(self, whole, *args, **kwargs)

    Collectives.gather = counted  # type: ignore[method-assign]
    try:
        with state_dict_of(model, names):
            weights = shardproof.full_state_dict(model, rank0_only=False)
    finally:
        Collectives.gather = original  # type: ignore[method-assign]
    if torch.distributed.get_rank():
        pick_adapters(model, weights)
        saved = expected
    else:
        saved = get_peft_model_state_dict(model, weights)
    same = saved.keys() == expected.keys() and all(torch.equal(saved[name], expected[name]) for name in expected)
    return same and weights.keys() == names, gathered, sum(value.numel() for value in expected.values())


@pytest.mark.parametrize("save", [None, ["lm_head"]])
def test_only_what_is_saved_is_gathered(run2, save: list[str] | None) -> None:
    for same, gathered, elements in run2(save_adapters, save):
        assert same
        assert gathered == elements


def test_of_other_models_everything_is_saved() -> None:
    from shardproof.integrations.saved import saved_names

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert saved_names(model) == set(model.state_dict())


def save_where_one_rank_ran_less(folder: str) -> list[str]:
    """Rank 0 computes once more: what is frozen is there on it alone."""
    from safetensors import safe_open
    from transformers import Trainer, TrainingArguments

    from shardproof.integrations.transformers import sharded

    model = peft_model(["down_proj"])
    layers = model.get_base_model().model.layers
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 2
    args = TrainingArguments(
        output_dir=folder, max_steps=1, per_device_train_batch_size=1, use_cpu=True, save_strategy="no", report_to=[]
    )
    trainer = sharded(Trainer)(model=model, args=args, train_dataset=rows, stage=3)
    trainer.train()
    if torch.distributed.get_rank() == 0:
        with torch.no_grad():
            for _ in range(2):  # from the second pass in a row on, they stay
                model(input_ids=torch.tensor([[1, 2, 3, 4]]))
        assert all(p.flat.fresh for p in layers[1].parameters() if not p.requires_grad)
    trainer.save_model(folder)
    torch.distributed.barrier()  # which is none of the engine's: nobody lends there
    with safe_open(f"{folder}/adapter_model.safetensors", "pt") as file:
        return sorted(file.keys())


def test_ranks_that_have_gathered_other_parts_save_together(run2, tmp_path) -> None:
    names, others = run2(save_where_one_rank_ran_less, str(tmp_path))
    assert names == others
    assert sum("down_proj" in name for name in names) == 2
