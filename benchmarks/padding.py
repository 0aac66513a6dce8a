"""What does padding cost? A step of a decoder on rows of random lengths: padded, without padding, and packed.

    python benchmarks/padding.py                                     # 34 M parameters, 8 rows of 32 to 256 tokens
    python benchmarks/padding.py --rows 8 --longest 1024
    python benchmarks/padding.py --model 3b --rows 8 --longest 4096 --checkpointed   # on a GPU, in bf16

`padded` and `sdpa, padded` compute every row at the length of the longest, with `--attn varlen` and with sdpa;
`padding-free` is the same batch with `--padding-free`, and `packed` the same rows with `--packing`. All must have the
loss of `sdpa, padded` before they are timed. In every round each takes one step (forward and backward), in a new random
order; a ratio is the median of the ratios within the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from card import clock, device_here
from torch.nn import functional as F

from shardproof.models.attention.padding_free import make_padding_free
from shardproof.models.attention.varlen import VARLEN, attention_options

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    "34m": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1536},
    "3b": {"hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 20, "intermediate_size": 8192},
}
WORDS = 8192


def model_of(shape: dict[str, Any], device: torch.device, checkpointed: bool) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    attention_options(VARLEN)
    width = shape["hidden_size"] // shape["num_attention_heads"]
    heads = {"num_key_value_heads": shape["num_attention_heads"] // 2, "head_dim": width}
    config = Qwen3Config(vocab_size=WORDS, **shape, **heads)
    torch.manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = Qwen3ForCausalLM(config).to(device, dtype)
    model.set_attn_implementation(VARLEN)
    make_padding_free(model)
    if checkpointed:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    return model


def batch_of(rows: int, longest: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Rows with lengths from an eighth of `longest` to all of it."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(longest // 8, longest + 1, (rows,), generator=draw)
    lengths[0] = longest
    ids = torch.randint(5, WORDS, (rows, longest), generator=draw)
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def packed(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    real = batch["attention_mask"].bool()
    counted = batch["attention_mask"].cumsum(1) - 1
    return {"input_ids": batch["input_ids"][real][None], "position_ids": counted[real][None]}


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over all tokens but the first of each row."""
    logits = model(**batch, use_cache=False).logits[:, :-1]
    if "attention_mask" in batch:
        learnt = batch["attention_mask"][:, 1:].bool()
    else:
        learnt = batch["position_ids"][:, 1:].ne(0)
    return F.cross_entropy(logits[learnt].float(), batch["input_ids"][:, 1:][learnt])


def engines_of(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, Callable[[], float]]:
    hooks, together = model.get_decoder().padding_free, packed(batch)

    def step(inputs: dict[str, torch.Tensor], attention: str, free: bool) -> float:
        if model.config._attn_implementation != attention:
            model.set_attn_implementation(attention)
        hooks.on = free
        model.zero_grad()
        loss = loss_of(model, inputs)
        loss.backward()
        return float(loss.detach())

    return {
        "sdpa, padded": lambda: step(batch, "sdpa", False),
        "padded": lambda: step(batch, VARLEN, False),
        "padding-free": lambda: step(batch, VARLEN, True),
        "packed": lambda: step(together, VARLEN, False),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="34m")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--longest", type=int, default=256, help="tokens; rows have an eighth of this to all of it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checkpointed", action="store_true", help="with gradient checkpointing")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = device_here()
    if device.type == "cpu":
        torch.set_num_threads(1)
    model = model_of(SHAPES[args.model], device, args.checkpointed)
    batch = batch_of(args.rows, args.longest, device)
    engines = engines_of(model, batch)
    losses = {name: step() for name, step in engines.items()}
    expected = losses["sdpa, padded"]
    near = 1e-5 if device.type == "cpu" else 1e-2
    if wrong := [name for name, loss in losses.items() if abs(loss - expected) > near * expected]:
        raise SystemExit(f"{', '.join(wrong)}: another loss ({losses})")
    times: dict[str, list[float]] = {name: [] for name in engines}
    order, draw = list(engines), random.Random(0)
    for _ in range(args.rounds):
        draw.shuffle(order)
        for name in order:
            begin = clock()
            engines[name]()
            times[name].append(clock() - begin)
    real = float(batch["attention_mask"].float().mean())
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    rows = f"{args.rows} rows of up to {args.longest} tokens, {1 - real:.0%} of it padding"
    print(f"{parameters:.0f} M parameters, {rows}, on {device.type}\n")
    print("| | ms | / sdpa, padded |\n|---|---|---|")
    for name, found in times.items():
        ratio = statistics.median(a / b for a, b in zip(found, times["sdpa, padded"], strict=True))
        print(f"| {name} | {1e3 * statistics.median(found):.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
