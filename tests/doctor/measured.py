"""What a rank really holds and moves in a step: what `stats` tells, and every byte of torch's CPU allocator."""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardproof

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from memory import Ledger, no_chatter, storages

Way = tuple[int, bool]  # the stage, and whether activations are computed again


def held_and_moved(ways: list[Way], folder: str, micro: int, length: int) -> dict[Way, dict[str, float]]:
    """Bytes on this rank, for each way to train a model made from the config in `folder`.

    One profile, of rank 0 only, spans them all: the profiler does not bear being started again and again.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    ledger = Ledger(0) if dist.get_rank() == 0 else None
    with no_chatter(), ledger or contextlib.nullcontext():
        found = {way: trained(way, config, micro, length, ledger) for way in ways}
    for way, peak in peaks(ledger).items() if ledger else []:
        found[way]["peak"] = peak
    return found


def trained(way: Way, config: Any, micro: int, length: int, ledger: Ledger | None) -> dict[str, float]:
    """Two steps. The moments noted are: before there is anything, sharded, and after the steps."""
    from transformers import AutoModelForCausalLM

    stage, again = way
    note(ledger, f"before {stage} {again}")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    if again:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    buffers = sum(b.untyped_storage().nbytes() for b in model.buffers())
    model = shardproof.shard(model, stage, mixed_precision=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(100, (micro, length), generator=torch.Generator().manual_seed(dist.get_rank()))
    note(ledger, f"sharded {stage} {again}")
    for _ in range(2):
        before = shardproof.stats(model).total
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        gradients = storages(p.grad.local for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()  # else a cycle that Python has not found yet may keep a buffer from being used again
    note(ledger, f"trained {stage} {again}")
    total = shardproof.stats(model).total
    return {
        "weights": total.shard_bytes + buffers,
        "optimizer": storages(t for state in optimizer.state.values() for t in state.values()),
        "gradients": gradients,
        "moved": total.bytes_gathered + total.bytes_reduced - before.bytes_gathered - before.bytes_reduced,
    }


def note(ledger: Ledger | None, moment: str) -> None:
    gc.collect()
    if ledger is not None:
        ledger.note(moment)


def peaks(ledger: Ledger) -> dict[Way, float]:
    """The most that was allocated while each way trained, beyond what was there before it."""
    events = ledger.profile.profiler.kineto_results.events()
    found: dict[Way, float] = {}
    live = base = 0
    training: Way | None = None
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
        elif event.name().startswith("moment: "):
            word, stage, again = event.name().removeprefix("moment: ").split()
            base = live if word == "before" else base
            training = (int(stage), again == "True") if word == "sharded" else None
        if training is not None:
            found[training] = max(found.get(training, 0), live - base)
    return found
