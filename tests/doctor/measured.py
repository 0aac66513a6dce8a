"""What a rank really holds and moves in a step: what `stats` tells, and every byte of torch's CPU allocator."""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import shardproof

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from memory import Ledger, no_chatter, storages

Way = tuple[int, bool | int | str]  # the stage, and which activations are computed again, by the words of sft


def held_and_moved(way: Way, folder: str, micro: int, length: int) -> dict[str, float]:
    """Bytes on this rank in two steps of a model made from the config in `folder`; the peak on rank 0 only.

    Once in a process: the profiler does not bear being started again and again, and of a model before this one
    something may go in mid-step.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from shardproof.train.activations import choose_checkpointing

    stage, again = way
    config = AutoConfig.from_pretrained(folder)
    ledger = Ledger(0) if dist.get_rank() == 0 else None
    with no_chatter(), ledger or contextlib.nullcontext():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        if again:
            choose_checkpointing(model, again).gradient_checkpointing_enable({"use_reentrant": False})
        buffers = sum(b.untyped_storage().nbytes() for b in model.buffers())
        model = shardproof.shard(model, stage, mixed_precision=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        ids = torch.randint(100, (micro, length), generator=torch.Generator().manual_seed(dist.get_rank()))
        note(ledger, "sharded")
        for _ in range(2):
            before = shardproof.stats(model).total
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            gradients = storages(p.grad.local for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            gc.collect()  # else a cycle that Python has not found yet may keep a buffer from being used again
        note(ledger, "trained")
    total = shardproof.stats(model).total
    weights = total.shard_bytes + buffers
    return {
        "weights": weights,
        "optimizer": storages(t for state in optimizer.state.values() for t in state.values()),
        "gradients": gradients,
        "moved": total.bytes_gathered + total.bytes_reduced - before.bytes_gathered - before.bytes_reduced,
        "peak": weights + grown(ledger) if ledger else 0,
    }


def note(ledger: Ledger | None, moment: str) -> None:
    gc.collect()
    if ledger is not None:
        ledger.note(moment)


def grown(ledger: Ledger) -> float:
    """The most that was allocated while it trained, beyond what was there when the model had been sharded.

    Counted from there because a thread of gloo lets go of a broadcast a moment after the wait for it: memory that it
    frees is not seen, so what comes before is not known to the byte."""
    most = live = base = 0
    for event in sorted(ledger.profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
        elif event.name() == "moment: sharded":
            base = most = live
        elif event.name() == "moment: trained":
            break
    return most - base
