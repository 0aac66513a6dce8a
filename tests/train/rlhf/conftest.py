"""Small rows of every form, the tiny model, and runs of `shardproof rlhf` in ranks that are there already."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from train.rlhf.algorithms import Series, prepared_for, series_of

WORDS = "the a process shard gradient memory weight step rank model gathers holds sends adds every one".split()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`pairs`, `judged`, `prompts` and `chats`: 12 rows each, of very different lengths."""
    chance = random.Random(0)
    folder = tmp_path_factory.mktemp("rows")

    def text(longest: int) -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(1, longest)))

    rows: dict[str, list[dict[str, Any]]] = {"pairs": [], "judged": [], "prompts": [], "chats": []}
    for i in range(12):
        question, answer = {"role": "user", "content": text(6)}, {"role": "assistant", "content": text(12)}
        rows["pairs"].append({"messages": [question, answer], "rejected_response": text(12) + " no"})
        rows["judged"].append({"messages": [question, answer], "label": i % 2 == 0})
        rows["prompts"].append({"messages": [question], "solution": f"#### {i}"})
        rows["chats"].append({"messages": [question, answer]})
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return {name: folder / f"{name}.jsonl" for name in rows}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, files: dict[str, Path]) -> dict[str, Path]:
    """`policy` and `other`, two tiny models with one tokenizer, and `judge`, which gives a score."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, set_seed

    from shardproof.data.rows import read_rows
    from shardproof.models.tiny import build_tiny

    folder = tmp_path_factory.mktemp("models")
    build_tiny(folder / "policy", read_rows([files["chats"]]).texts())
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    set_seed(1)
    policy = AutoModelForCausalLM.from_pretrained(folder / "policy")
    # Many tokens end an answer, so that answers end in different places.
    policy.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(300, 600)]
    policy.generation_config.save_pretrained(folder / "policy")
    for parameter in policy.parameters():
        parameter.data.add_(0.02 * parameter.data.new_empty(parameter.shape).normal_())
    policy.save_pretrained(folder / "other")
    judge = AutoModelForSequenceClassification.from_pretrained(
        folder / "policy", num_labels=1, pad_token_id=tokenizer.pad_token_id
    )
    judge.save_pretrained(folder / "judge")
    for name in ("other", "judge"):
        tokenizer.save_pretrained(folder / name)
    return {name: folder / name for name in ("policy", "other", "judge")}


@pytest.fixture(scope="session")
def learnt_positions(models: dict[str, Path]) -> Path:
    """A GPT-2 with the policy's tokenizer."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig, GPT2Config, GPT2LMHeadModel

    folder = models["policy"].parent / "gpt2"
    tokenizer = AutoTokenizer.from_pretrained(models["policy"])
    torch.manual_seed(0)
    still = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    tokens = {"vocab_size": 1024, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=256, **tokens, **still))
    model.generation_config = GenerationConfig.from_pretrained(models["policy"])
    for name, parameter in model.named_parameters():
        if "wpe" in name:
            parameter.data.normal_(std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def experts(models: dict[str, Path]) -> Path:
    """A mixture of experts with the policy's tokenizer. TRL balances them."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = models["policy"].parent / "experts"
    tokenizer = AutoTokenizer.from_pretrained(models["policy"])
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
    mixed = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.5}
    tokens = {"vocab_size": 1024, "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(hidden_size=32, intermediate_size=32, **heads, **mixed, **tokens))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapters(models: dict[str, Path]) -> None:
    """`adapters` and `more-adapters`, of PEFT's, on `policy` beside the models; they are far from nothing."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    for seed, name in enumerate(("adapters", "more-adapters")):
        torch.manual_seed(seed)
        made = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(models["policy"]), made)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(std=0.1)
        model.save_pretrained(models["policy"].parent / name)


@pytest.fixture
def rlhf(pools: Any, files: dict[str, Path], models: dict[str, Path], tmp_path: Path) -> Callable[..., list[Series]]:
    """`rlhf(world, variants, *options)`: the records of a run with each of `variants` added to the options; or what
    else `find` makes of these runs on the first rank."""

    def runs(
        world: int, variants: list[dict[str, Any]], *options: str, find: Callable[..., Any] = series_of
    ) -> list[Series]:
        named = {"FILES": str(files["pairs"].parent), "MODELS": str(models["policy"].parent)}
        argv = [_replaced(option, named) for option in options]
        prepared = prepared_for(argv, world, variants, Path(tempfile.mkdtemp(dir=tmp_path)))
        return pools.run(world, find, prepared, timeout=300.0)[0]

    return runs


def _replaced(option: str, named: dict[str, str]) -> str:
    for name, value in named.items():
        option = option.replace(name, value)
    return option
