"""Cases with real transformers models, built tiny from their configs: training, generation, checkpointing, LoRA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distributed.harness import Case, Env
from shardproof.models.checkpointing import enable_checkpointing

CASES: dict[str, Case] = {}
VOCABULARY = 53


def tiny(family: str, **changes: Any) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "attention_dropout": 0.0,
        # Large enough that a step changes the loss well above the noise of fp32.
        "initializer_range": 0.2,
    }
    if family == "Qwen3Moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
    if family == "GptOss":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
    return getattr(transformers, f"{family}ForCausalLM")(config)


def texts(k: int, n: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3000 + k)
    return {"input_ids": torch.randint(2, VOCABULARY, (n, 9), generator=generator)}


PROMPT = torch.tensor([[1, 7, 9, 4], [1, 5, 8, 3]])


def train_step(env: Env, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    return loss


def train_and_generate(env: Env, model: nn.Module, batch: dict[str, torch.Tensor]) -> list[Any]:
    """Greedy, sampled and beam search, in eval mode and straight after; the tokens are compared one by one."""
    loss = train_step(env, model, batch)
    model.eval()
    greedy = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=4, do_sample=False)
    torch.manual_seed(11 + env.k)
    sampled = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=3, do_sample=True)
    model.train()
    uncached = model.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=2, do_sample=False, use_cache=False
    )
    return [loss, *greedy[:, 4:].flatten(), *sampled[:, 4:].flatten(), *uncached[:, 4:].flatten()]


def case(name: str, build: Callable[[], nn.Module], step: Any = train_step, **fields: Any) -> None:
    # After two steps of Adam: 1.1e-6 with AVX-512, less than 1e-6 with AVX2.
    CASES[name] = Case(build, step, **{"rows": texts, "tolerance": 2e-6, **fields})


def checkpointed(family: str, reentrant: bool, **changes: Any) -> nn.Module:
    model = tiny(family, **changes)
    enable_checkpointing(model, reentrant)
    return model.train()


def lora(family: str, checkpointing: bool | None = None, save: Any = None, **changes: Any) -> nn.Module:
    """`checkpointing`: None, or whether it is reentrant."""
    import peft

    model = tiny(family, **changes)
    if checkpointing is not None:
        enable_checkpointing(model, checkpointing)
        model.enable_input_require_grads()
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], modules_to_save=save)
    return peft.get_peft_model(model, config).train()


for family in ("Qwen3", "Llama", "Qwen3Moe"):
    name = family.lower()
    case(name, functools.partial(tiny, family, tie_word_embeddings=family == "Qwen3"))
    for reentrant in (False, True):
        kind = "reentrant" if reentrant else "nonreentrant"
        case(f"{name}_checkpointing_{kind}", functools.partial(checkpointed, family, reentrant))
case("qwen3_generates_between_steps", functools.partial(tiny, "Qwen3", tie_word_embeddings=True), train_and_generate)
case("llama_generates_between_steps", functools.partial(tiny, "Llama"), train_and_generate)
case("qwen3moe_generates_between_steps", functools.partial(tiny, "Qwen3Moe"), train_and_generate)
case("qwen3_eager_attention", functools.partial(tiny, "Qwen3", attn_implementation="eager"))
case("qwen3_lora", functools.partial(lora, "Qwen3", tie_word_embeddings=True))
case("qwen3_lora_checkpointing_nonreentrant", functools.partial(lora, "Qwen3", False))
case("qwen3_lora_checkpointing_reentrant", functools.partial(lora, "Qwen3", True))
case("llama_lora_with_a_trained_head", functools.partial(lora, "Llama", save=["lm_head"]))
case("qwen3moe_lora", functools.partial(lora, "Qwen3Moe"))
case("qwen3_lora_generates_between_steps", functools.partial(lora, "Qwen3"), train_and_generate)


def reference_free(env: Env, model: nn.Module, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """DPO's way with LoRA: the base model, adapters off, is the reference in the same loss."""
    with torch.no_grad(), model.disable_adapter():
        base = model(**batch).logits
    out = model(**batch, labels=batch["input_ids"])
    loss = out.loss + (out.logits - base).square().mean()
    loss.backward()
    return [loss, base.square().mean()]


case("qwen3_lora_with_adapters_off_as_reference", functools.partial(lora, "Qwen3"), reference_free)
