"""Two real steps, at the stage and number of processes of the run: on the same rows, at the peak learning rate."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardproof.doctor.check import Check, some
from shardproof.doctor.machine import installed
from shardproof.doctor.observe import observe
from shardproof.doctor.rlhf_checks import draws_answers, rewards
from shardproof.train.run import Prepared
from shardproof.zero.device import default_device
from shardproof.zero.parameter import ShardedParameter

AREA, RESULT = "trial", "trial.json"
STEPS = 3  # two, and a third that shows the loss after them
ROSE = 1.1  # a loss that is higher by this factor after two steps on the very rows is not learning
NORM = 1e4  # a gradient norm beyond this is out of any order
NETWORK = 16 << 20  # bytes that are sent to measure


def trial(prepared: Prepared, folder: str) -> None:
    """Run the steps on this rank; rank 0 writes what was seen."""
    ranks = _ranks()
    seen: dict[str, Any] = {"without": [], "not_finite": [], "apart": [], "steps": 0, **ranks}

    def each(step: int, params: dict[str, ShardedParameter]) -> None:
        grads = {name: p.grad for name, p in params.items()}
        seen["steps"] = step
        if step > 1:
            return
        seen["without"] = [name for name, grad in grads.items() if grad is None]
        there = {name: grad for name, grad in grads.items() if grad is not None}
        if there:
            norms = torch.stack([g.norm().float() for g in there.values()])
            seen["not_finite"] = [n for n, ok in zip(there, norms.isfinite().tolist(), strict=True) if not ok]
        seen["apart"] = _differing(params)

    records = observe(prepared, each)
    if not dist.is_initialized() or dist.get_rank() == 0:
        logged = [r for r in records if "loss" in r]
        seen["losses"] = [_number(r["loss"]) for r in logged]
        seen["norms"] = [_number(r.get("grad_norm")) for r in logged]
        seen["drawn"] = logged if draws_answers(prepared.config) else None
        (Path(folder) / RESULT).write_text(json.dumps(seen))


def _number(value: Any) -> float | None:
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None


def _ranks() -> dict[str, Any]:
    """Clocks, software and the network of all ranks."""
    here = hashlib.sha256(json.dumps([platform.python_version(), installed()]).encode()).hexdigest()[:12]
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {"clocks": 0.0, "software": [here], "network": None}
    dist.barrier()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (time.time(), here))
    device = torch.device("cpu") if dist.get_backend() == "gloo" else default_device()
    message = torch.zeros(NETWORK // 4, device=device)
    dist.all_reduce(message)
    start = time.perf_counter()
    dist.all_reduce(message)
    if device.type != "cpu":
        torch.accelerator.synchronize()
    speed = 2 * NETWORK / (time.perf_counter() - start)
    times = [moment for moment, _ in everyone]
    return {"clocks": max(times) - min(times), "software": sorted({s for _, s in everyone}), "network": speed}


def _differing(params: dict[str, ShardedParameter]) -> list[str]:
    """Parameters whose whole values are not the same on all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    sums = torch.stack([p.whole().double().sum().cpu() for p in params.values()])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sums)
    return [name for i, name in enumerate(params) if len({float(each[i]) for each in everyone}) > 1]


def judge(folder: str) -> list[Check]:
    """Checks from what `trial` wrote."""
    seen = json.loads((Path(folder) / RESULT).read_text())
    checks = [*_judge_ranks(seen)]
    if seen["without"]:
        names = seen["without"]
        cause = "They are trained, but nothing of the loss depends on them: no step changes them."
        option = "--freeze the part, or look at the forward; with reentrant checkpointing: --checkpointing-reentrant no"
        checks.append(Check(AREA, "gradients", "fail", f"none for {len(names)}: {some(names)}", cause, option))
    elif seen["not_finite"]:
        names = seen["not_finite"]
        cause = "The gradient holds inf or nan in the first step."
        checks.append(
            Check(
                AREA,
                "gradients",
                "fail",
                f"{len(names)}: {some(names)}",
                cause,
                "--precision fp32, and look at the loss",
            )
        )
    else:
        checks.append(Check(AREA, "gradients", "ok", "every trained parameter has one, and it is finite"))
    drawn = seen["drawn"]
    told = rewards(drawn or [])
    idle = any(check.status != "ok" for check in told)  # then a gradient of zero is told already
    return [*checks, *told, *_judge_course(seen["losses"], seen["norms"], drawn is not None, idle)]


def _judge_ranks(seen: dict[str, Any]) -> list[Check]:
    checks = []
    if seen["network"] is None:
        return []
    speed = f"{seen['network'] / 1e9:.2f} GB/s"
    if len(seen["software"]) > 1:
        cause = "Ranks run different releases of Python or of the libraries."
        checks.append(
            Check(AREA, "ranks", "fail", f"{len(seen['software'])} kinds", cause, "the same environment on every node")
        )
    elif seen["clocks"] > 5:
        cause = "Times in logs and the age of checkpoints cannot be compared."
        checks.append(
            Check(AREA, "ranks", "warn", f"clocks differ by {seen['clocks']:.0f} s", cause, "set the clocks by NTP")
        )
    elif seen["apart"]:
        checks.append(
            Check(AREA, "ranks", "fail", some(seen["apart"]), "Ranks hold different weights.", "one seed for all ranks")
        )
    else:
        checks.append(Check(AREA, "ranks", "ok", f"the same software and weights, {speed} between them"))
    return checks


def _judge_course(
    losses: list[float | None], norms: list[float | None], drawn: bool = False, idle: bool = False
) -> list[Check]:
    """`drawn`: whether each step learnt from answers of its own, so that losses cannot be compared; `idle`: whether it
    is known that there was nothing to learn."""
    shown = ", ".join("not a number" if loss is None else f"{loss:.3f}" for loss in losses)
    checks = []
    first, last = losses[0], losses[-1]
    if drawn and None not in losses:
        checks.append(Check(AREA, "loss", "ok", f"{shown}, each of other answers"))
    elif first is None or last is None or last > ROSE * first + 0.05:
        cause = "After two steps on these very rows the loss is higher than before: the steps are too large."
        checks.append(Check(AREA, "loss", "fail", shown, cause, "a --learning-rate 10 to 100 times smaller"))
    else:
        checks.append(Check(AREA, "loss", "ok", f"{shown} on the same rows"))
    shown = ", ".join("not a number" if norm is None else f"{norm:.3g}" for norm in norms)
    if norms[0] is None or norms[0] > NORM or (norms[0] == 0 and not idle):
        cause = (
            "A gradient norm like this comes from a loss that is not a mean, from inf or nan, or from nothing learnt."
        )
        checks.append(Check(AREA, "gradient norm", "fail", shown, cause, "look at the loss; --precision fp32"))
    else:
        checks.append(Check(AREA, "gradient norm", "ok", shown))
    return checks
