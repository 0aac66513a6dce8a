"""`python weights.py KIND FOLDER`: which weights a real vLLM holds differently when they come from us.

One model is read from its files by vLLM, another one with the same shapes is given to it by us, at stage 3, and read
from its own files for comparison. Prints JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

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
    "llama": TEXT,
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


def main(kind: str, folder: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import ensure_master_addr_port
    from vllm import LLM

    import shardproof
    from shardproof.integrations.server import serve_weights

    ensure_master_addr_port()
    first, other = folder / "first", folder / "other"
    write(kind, 1, first)
    write(kind, 2, other)
    # As TRL makes one, but for what is compiled.
    llm = LLM(
        model=str(first),
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=4,
        distributed_executor_backend="external_launcher",
        max_num_batched_tokens=4096,
        enforce_eager=True,
    )
    worker = llm.llm_engine.model_executor.driver_worker

    def held() -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in worker.model_runner.model.named_parameters()}

    before = held()
    model = shardproof.shard(AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32), 3)
    accelerator = SimpleNamespace(device=torch.device("cpu"))
    generation = SimpleNamespace(mode="colocate", llm=llm, accelerator=accelerator, _iter_named_params=None)
    serve_weights(generation, model, lambda _: True)
    assert list(generation._iter_named_params()) == []  # it has been done
    given = held()
    worker.reload_weights(weights_path=str(other))
    read = held()
    return {
        "all": len(read),
        "moved": sum(not torch.equal(before[name], value) for name, value in read.items()),
        "differ": [name for name, value in read.items() if not torch.equal(given[name], value)],
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
