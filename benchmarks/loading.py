"""How much host memory does a rank need to load and shard a model? Ours compared with from_pretrained on every rank.

    python benchmarks/loading.py                       # 250 M parameters, bf16 files, 4 processes
    python benchmarks/loading.py --layers 8 --world 2
    python benchmarks/loading.py --experts 16 --layers 6            # a mixture of experts, stored separately in files
    python benchmarks/loading.py --missing                          # files that contain only a norm

A Llama (with --experts, a Qwen3Moe) with random weights is written in bf16 to files of 200 MB. Then each method loads
it in fp32 in fresh processes and shards it at stage 3:

- ours: `shardproof.load_pretrained(folder, stage=3)`; each rank reads its ranges;
- whole: `shardproof.shard(AutoModelForCausalLM.from_pretrained(folder), stage=3)` on every rank, as in a loop
  without sharded loading.

Peak is the growth of resident memory (VmHWM, reset before loading), including mapped files; the promise is the rank's
shard and the largest unit. All ranks must then hold the same weights. Exits with status 1 if ours exceeds the promise
by more than --slack.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MB = 1e6


def write_model(folder: str, hidden: int, layers: int, vocabulary: int, experts: int, missing: bool) -> int:
    """Returns the number of parameters."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "head_dim": 64,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    if experts:
        config = Qwen3MoeConfig(num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=hidden, **sizes)
        model = Qwen3MoeForCausalLM(config).bfloat16()
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16()
    if missing:
        model.config.save_pretrained(folder)
        save_file({"model.norm.weight": model.model.norm.weight.data}, f"{folder}/model.safetensors", {"format": "pt"})
    else:
        model.save_pretrained(folder, max_shard_size="200MB")
    return sum(p.numel() for p in model.parameters())


def status(field: str) -> int:
    """Bytes, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def load(way: str, folder: str) -> Any:
    import transformers

    import shardproof

    torch.manual_seed(0)
    if way == "ours":
        return shardproof.load_pretrained(folder, 3, dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return shardproof.shard(model, 3)


def worker(rank: int, world: int, way: str, model: str, folder: str) -> None:
    import transformers

    import shardproof

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{way}", rank=rank, world_size=world)
    load(way, f"{model}-small")  # so that imports, connections and the heap are not measured
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before, started = status("VmRSS"), time.perf_counter()
    loaded = load(way, model)
    seconds, grown = time.perf_counter() - started, status("VmHWM") - before
    with torch.no_grad():
        digest = sum(float(p.norm()) for p in loaded.parameters())
    units = shardproof.stats(loaded).units.values()
    shard = sum(unit.shard_bytes for unit in units)
    result = {"grown": grown, "seconds": seconds, "shard": shard, "digest": digest}
    result["unit"] = world * max(unit.shard_bytes for unit in units)
    (Path(folder) / f"{way}-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--experts", type=int, default=0, help="per layer; 0 for a dense model")
    parser.add_argument("--missing", action="store_true", help="the files contain only a norm; the rest is initialised")
    parser.add_argument("--slack", type=float, default=16.0, help="MB")
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model"
        count = write_model(model, args.hidden, args.layers, args.vocabulary, args.experts, args.missing)
        write_model(f"{model}-small", 64, 2, 256, args.experts, args.missing)
        for way in ("ours", "whole"):
            mp.spawn(worker, args=(args.world, way, model, folder), nprocs=args.world)
            files = [Path(folder) / f"{way}-{rank}.json" for rank in range(args.world)]
            found[way] = [json.loads(file.read_text()) for file in files]
    first = found["ours"][0]
    promise = first["shard"] + first["unit"]
    print(
        f"{count / 1e6:.0f} M parameters, bf16 files loaded in fp32 ({4 * count / MB:.0f} MB), {args.world} processes"
    )
    print(f"a shard {first['shard'] / MB:.0f} MB, the largest unit {first['unit'] / MB:.0f} MB\n")
    print("| | peak of a rank, MB | of the promise | all ranks, MB | seconds |\n|---|---:|---:|---:|---:|")
    for way, ranks in found.items():
        worst, whole = max(r["grown"] for r in ranks), sum(r["grown"] for r in ranks)
        took = max(r["seconds"] for r in ranks)
        print(f"| {way} | {worst / MB:.0f} | {worst / promise:.2f} | {whole / MB:.0f} | {took:.1f} |")
    if len({f"{r['digest']:.6f}" for ranks in found.values() for r in ranks}) > 1:
        sys.exit("the weights differ")
    if max(r["grown"] for r in found["ours"]) > promise + args.slack * MB:
        sys.exit("more than a shard and a unit")


if __name__ == "__main__":
    main()
