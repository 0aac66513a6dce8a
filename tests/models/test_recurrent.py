"""Promise: packed rows are what each is by itself, also in layers that carry a state from token to token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from models.tiny_configs import TEXT
from shardproof.models.attention.recurrent import Documents, carries_state, isolate_documents
from shardproof.models.checkpointing import enable_checkpointing

SMALL: dict[str, Any] = {**TEXT, "max_position_embeddings": 512}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
BOTH = {"layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2}
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3_5Text": {**LINEAR, **BOTH},
    "Qwen3_5MoeText": {**LINEAR, **BOTH, **MOE},
    "Qwen3Next": {**LINEAR, **BOTH, **MOE},
    "OlmoHybrid": {**LINEAR, **BOTH, "linear_num_key_heads": 4},
    "Bamba": {**MAMBA, "attn_layer_indices": [1], "mamba_chunk_size": 16},
    "FalconH1": {**MAMBA, "mamba_d_ssm": 64, "mamba_chunk_size": 16},
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
}
LENGTHS = [[5, 1, 90, 4], [60, 40]]  # 1: padding, too


def build(kind: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **KINDS[kind]})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def packed() -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.tensor([[place for size in row for place in range(size)] for row in LENGTHS])
    return torch.randint(3, 64, positions.shape), positions


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_what_each_is_by_itself(kind: str, checkpointed: bool) -> None:
    model, (ids, positions), gradients = build(kind), packed(), []
    assert carries_state(model)
    expected = []
    for row, sizes in zip(ids, LENGTHS, strict=True):
        for document in row.split(sizes):
            expected.append(model(input_ids=document[None], use_cache=False).logits[0])
    torch.cat(expected).square().sum().backward()
    gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    together = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert (together.flatten(0, 1) - torch.cat(expected)).abs().max() > 3e-5  # without us, they leak
    isolate_documents(model)
    if checkpointed:
        enable_checkpointing(model.train(), False)
    together = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(together.flatten(0, 1), torch.cat(expected), rtol=1e-4, atol=2e-6)
    together.square().sum().backward()
    gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


def test_other_rows_are_computed_as_ever() -> None:
    model, ids = build("Qwen3_5Text"), torch.randint(3, 64, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    before = [model(input_ids=ids, attention_mask=m, use_cache=False).logits for m in (None, mask)]
    written = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    isolate_documents(model)
    after = [model(input_ids=ids, attention_mask=m, use_cache=False).logits for m in (None, mask)]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert torch.equal(model.generate(input_ids=ids, max_new_tokens=5, do_sample=False), written)


def test_documents_of_similar_length_are_seen_together() -> None:
    found = Documents.of(packed()[1])
    assert [tuple(places.shape) for places in found.groups] == [(5, 60), (1, 90)]
    hidden = torch.randn(2, 100, 3)
    assert torch.equal(found.each(lambda rows: rows, hidden), hidden)
    assert Documents.of(torch.arange(5).expand(3, -1)) is None
