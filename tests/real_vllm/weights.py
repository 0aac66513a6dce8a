"""`python weights.py given|read KIND FOLDER`: write down what a real vLLM holds of a model.

`given`: one that has read another model of the same shapes from files, and is given this one by us, at stage 3, as TRL
hands it on. `read`: one that has read this model from files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

TEXT = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": TEXT,
    "phi3": TEXT,
    "gemma3_text": TEXT,
    "qwen3_moe": TEXT | MOE,
    "mixtral": TEXT | {"num_local_experts": 4},
    "gpt_oss": TEXT | {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def write(kind: str, seed: int, folder: Path) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**KINDS[kind], dtype="bfloat16"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(folder)


def main(how: str, kind: str, folder: Path) -> None:
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import ensure_master_addr_port
    from vllm import LLM

    import shardproof
    from shardproof.integrations.server import serve_weights

    ensure_master_addr_port()
    other, this = folder / "other", folder / "this"
    if how == "given":
        write(kind, 1, other)
        write(kind, 2, this)
    # As TRL makes one, but for what is compiled.
    llm = LLM(
        model=str(other if how == "given" else this),
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=4,
        distributed_executor_backend="external_launcher",
        max_num_batched_tokens=4096,
        enforce_eager=True,
    )
    net = llm.llm_engine.model_executor.driver_worker.model_runner.model
    if how == "given":
        save_file({n: value.contiguous() for n, value in net.named_parameters()}, folder / "before.safetensors")
        model = shardproof.shard(AutoModelForCausalLM.from_pretrained(this, dtype=torch.float32), 3)
        accelerator = SimpleNamespace(device=torch.device("cpu"))
        generation = SimpleNamespace(mode="colocate", accelerator=accelerator, _iter_named_params=None)
        serve_weights(generation, model, lambda _: True)
        for weight in generation._iter_named_params():
            net.load_weights([weight])
    save_file({name: value.contiguous() for name, value in net.named_parameters()}, folder / f"{how}.safetensors")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
