"""What does `--attn varlen` save when documents share a row? Forward and backward of a small model, alternating with
transformers' own attention: sdpa with a mask for Qwen3, eager for gpt-oss, which has sinks.

    python benchmarks/documents.py
    python benchmarks/documents.py --documents 30 --length 34
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import transformers
from card import clock, device_here

from shardproof.models.attention.masks import tell_masks_of_positions
from shardproof.models.attention.varlen import attention_options

SHAPE = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 32,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3": ("sdpa", {}),
    "GptOss": ("eager", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128}),
}


def made(family: str, attn: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE, **FAMILIES[family][1])
    model = transformers.AutoModelForCausalLM.from_config(config, **attention_options(attn))
    tell_masks_of_positions(model)
    device = device_here()
    return model.to(device, torch.float32 if device.type == "cpu" else torch.bfloat16)


def passes(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> tuple[float, float]:
    """Seconds for a forward and a backward pass, and the loss."""
    begin = clock()
    loss = model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss
    loss.backward()
    return clock() - begin, float(loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--length", type=int, default=512, help="tokens of each document")
    parser.add_argument("--rounds", type=int, default=4, help="the first is not counted")
    options = parser.parse_args()
    device = device_here()
    ids = torch.randint(1, 2000, (1, options.documents * options.length), device=device)
    positions = torch.arange(options.length, device=device).repeat(options.documents)[None]
    print("| model | attention | ms | |\n|---|---|---:|---:|")
    for family, (theirs, _) in FAMILIES.items():
        models = {attn: made(family, attn) for attn in (theirs, "varlen")}
        taken: dict[str, list[float]] = {attn: [] for attn in models}
        losses: dict[str, float] = {}
        for _ in range(options.rounds):
            for attn, model in models.items():
                seconds, losses[attn] = passes(model, ids, positions)
                taken[attn].append(seconds)
        if abs(losses["varlen"] / losses[theirs] - 1) > (1e-5 if device.type == "cpu" else 1e-2):
            raise SystemExit(f"{family}: the losses differ: {losses}")
        medians = {attn: statistics.median(times[1:]) for attn, times in taken.items()}
        for attn, median in medians.items():
            print(f"| {family} | {attn} | {1e3 * median:.0f} | {median / medians[theirs]:.2f} |")


if __name__ == "__main__":
    main()
