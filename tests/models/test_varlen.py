"""Promise: with `--attn varlen`, rows are what they are with torch's attention, packed or padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from models.tiny_configs import TEXT
from shardproof.errors import ConfigError
from shardproof.models.attention import sinks, varlen
from shardproof.models.attention.masks import tell_masks_of_positions
from shardproof.models.attention.varlen import attention_options, check_attention_of, varlen_mask

SMALL: dict[str, Any] = {**TEXT, "max_position_embeddings": 64}
SLIDING = {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
MLA = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "head_dim": 4,
    "v_head_dim": 6,
}
MLA |= {"num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
MLA |= {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "fewer heads of keys": ("Qwen2", {}),
    "one head of keys": ("Llama", {"num_key_value_heads": 1}),
    "a window in some layers": ("Qwen2", SLIDING),
    "a window in all layers": ("Mistral", {"sliding_window": 3}),
    "a window that layers do not speak of": ("Qwen2Moe", SLIDING | {"mlp_only_layers": [0, 1]}),
    "norms of heads": ("Qwen3", {}),
    "values of another width": ("DeepseekV3", MLA),
    "chunks": (
        "Llama4Text",
        {"attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 32},
    ),
}


SINKS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3, "head_dim": 8}
KINDS |= {"sinks": ("GptOss", SINKS), "sinks, one head of keys": ("GptOss", {**SINKS, "num_key_value_heads": 1})}


def both(kind: str) -> list[Any]:
    """The model with torch's attention and with ours; with sinks, transformers has eager attention only."""
    family, more = KINDS[kind]
    models = []
    for attn in ("eager" if family == "GptOss" else "sdpa", "varlen"):
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**{**SMALL, **more})
        models.append(transformers.AutoModelForCausalLM.from_config(config, **attention_options(attn)))
        assert models[-1].config._attn_implementation == attn
        tell_masks_of_positions(models[-1])
    return models


def packed() -> dict[str, torch.Tensor]:
    """Two rows of documents, unlike each other; the last place of the second is padding."""
    positions = torch.tensor([[*range(5), *range(1), *range(6)], [*range(8), *range(3), 0]])
    return {"input_ids": torch.randint(1, 64, (2, 12)), "position_ids": positions}


def padded(left: bool) -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, slice(0, 5) if left else slice(7, 12)] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": torch.randint(1, 64, (2, 12)) * mask, "attention_mask": mask, "position_ids": positions}


def gap() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 4:6] = 0
    return {"input_ids": torch.randint(1, 64, (2, 12)) * mask, "attention_mask": mask}


BATCHES = {
    "packed": packed,
    "padded on the right": lambda: padded(False),
    "padded on the left": lambda: padded(True),
    "with a gap": gap,
    "whole": lambda: {"input_ids": torch.randint(1, 64, (2, 12))},
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_sdpa(kind, batch):
    torch.manual_seed(1)
    inputs, found = BATCHES[batch](), []
    real = inputs.get("attention_mask", torch.ones(2, 12)).bool()
    for model in both(kind):
        logits = model(**inputs, use_cache=False).logits[real]
        logits.square().mean().backward()
        found.append([logits, *(p.grad for p in model.parameters() if p.grad is not None)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_generated_as_with_sdpa(kind):
    torch.manual_seed(1)
    inputs, found = padded(True), []
    del inputs["position_ids"]
    for model in both(kind):
        found.append(model.eval().generate(**inputs, max_new_tokens=6, do_sample=False))
    assert torch.equal(*found)


def test_documents_and_padding_begin_where_they_do(monkeypatch):
    seen: list[Any] = []

    def attend(*args: Any) -> torch.Tensor:
        seen.append(args[3].tolist())
        return args[0]

    monkeypatch.setattr(varlen, "_attend", attend)
    model = both("fewer heads of keys")[1]
    for inputs in (packed(), padded(False), padded(True), BATCHES["whole"]()):
        model(**inputs, use_cache=False)
    expected = [[0, 5, 6, 12, 20, 23, 24], [0, 12, 19, 24], [0, 12, 17, 24], [0, 12, 24]]
    assert seen == [again for one in expected for again in (one, one)]  # two layers


@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_of_a_gpu_is_asked_as_it_wants_to_be(window):
    """By the shapes that torch tells of it: there is none here."""
    query, key, value = (torch.empty(12, heads, 8, device="meta", dtype=torch.bfloat16) for heads in (4, 2, 2))
    kernel = sinks._OnCuda(torch.empty(4, dtype=torch.int32, device="meta"), 5, 0.3, window)
    out, lse = kernel.forward(query, key, value)
    assert (out.shape, lse.shape) == (query.shape, (4, 12))
    grads = kernel.backward(torch.empty_like(out), query, key, value, out, lse)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]


def test_tokens_that_see_later_ones_are_left_to_sdpa():
    def sees(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) | ((q >= 2) & (q < 5) & (k >= 2) & (k < 5))

    found = varlen_mask(1, 8, 8, mask_function=sees, allow_is_causal_skip=False)
    assert found.shape == (1, 1, 8, 8)
    assert found[0, 0, 2].tolist() == [True] * 5 + [False] * 3


def test_a_model_without_flash_attention_is_refused():
    class Other:
        _supports_flash_attn = False

    with pytest.raises(ConfigError, match="Other has no flash attention"):
        check_attention_of(Other(), "varlen")
    check_attention_of(Other(), "sdpa")


def test_a_model_that_changes_scores_is_refused_when_it_is_loaded():
    model = transformers.AutoModelForCausalLM.from_config(transformers.Gemma2Config(**SMALL))
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM changes scores"):
        check_attention_of(model, "varlen")


def test_a_model_with_a_list_of_attentions_is_refused_with_advice(tmp_path):
    from shardproof.train.model.loading import load_model
    from shardproof.train.options.config import SftConfig

    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.AutoModelForCausalLM.from_config(transformers.FalconConfig(**shape)).save_pretrained(tmp_path)
    config = SftConfig(model=str(tmp_path), dataset=["rows.jsonl"], attn="varlen")
    with pytest.raises(ConfigError, match=r"cannot be loaded: its code has a list .* lacks --attn varlen. Use sdpa"):
        load_model(str(tmp_path), config)


def test_scores_that_are_changed_are_refused():
    config = transformers.Gemma2Config(**SMALL, attn_logit_softcapping=50.0)
    model = transformers.AutoModelForCausalLM.from_config(config, **attention_options("varlen"))
    with pytest.raises(ConfigError, match=r"Gemma2Attention changes scores \(softcap\)"):
        model(**packed(), use_cache=False)


# --- what packed rows take, if nothing is said ----------------------------------------------------------


def attention(tmp_path: Path, family: str, more: dict[str, Any], **options: Any) -> str:
    """That of a run's model."""
    from shardproof.train.model.loading import load_model
    from shardproof.train.options.config import SftConfig

    shape = {**SMALL, **more} if family != "Falcon" else more
    config = getattr(transformers, f"{family}Config")(**shape)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    run = SftConfig(model=str(tmp_path), dataset=["rows.jsonl"], **options)
    return str(load_model(str(tmp_path), run).config._attn_implementation)


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        ("Qwen3", {"packing": True}, "varlen"),
        ("Qwen3", {"packing": True, "attn": "sdpa"}, "sdpa"),
        ("Qwen3", {"packing": True, "compile": True}, "sdpa"),
        ("Qwen3", {}, "sdpa"),
        ("Gemma2", {"packing": True}, "eager"),
        ("GptOss", {"packing": True}, "varlen"),
        ("GptOss", {"packing": True, "attn": "eager"}, "eager"),
        ("GptOss", {}, "eager"),
        ("Falcon", {"packing": True}, "sdpa"),
    ],
)
def test_packed_rows_take_it_where_the_model_would_take_sdpa(tmp_path, family, options, expected):
    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"Falcon": shape, "GptOss": SINKS}
    assert attention(tmp_path, family, more.get(family, {}), **options) == expected


def test_positions_of_one_row_may_be_those_of_all():
    torch.manual_seed(1)
    ids, positions = torch.randint(1, 64, (2, 12)), packed()["position_ids"][:1]
    found = [m(input_ids=ids, position_ids=positions, use_cache=False).logits for m in both("sinks")]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("attn", [None, "eager"])
def test_packed_rows_of_gpt_oss_do_not_see_each_other(tmp_path, attn):
    """transformers makes its masks without looking at positions."""
    from shardproof.train.losses.shortcuts import check_packing
    from shardproof.train.model.loading import load_model
    from shardproof.train.options.config import SftConfig

    config = transformers.GptOssConfig(**{**SMALL, **SINKS})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    run = SftConfig(model=str(tmp_path), dataset=["rows.jsonl"], attn=attn)
    inputs = {"input_ids": torch.randint(1, 64, (1, 40))}
    with pytest.raises(ConfigError, match="depends on the row"):
        check_packing(load_model(str(tmp_path), run), inputs)
    check_packing(load_model(str(tmp_path), run.model_copy(update={"packing": True})), inputs)


@pytest.mark.parametrize(
    ("half", "flash", "expected"), [(True, True, "varlen"), (False, True, "sdpa"), (True, False, "sdpa")]
)
def test_on_a_gpu_they_take_it_where_it_has_the_kernel(monkeypatch, half, flash, expected):
    """Without the kernel, documents would be computed one by one, and the host would wait for where they begin."""
    model = both("fewer heads of keys")[0]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch, "empty", lambda *shape, **more: None)
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *given: given)
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda asked: flash)
    varlen.take_for_packed(model, half)
    assert model.config._attn_implementation == expected
