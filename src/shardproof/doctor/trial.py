"""Two real steps, at the stage and number of processes of the run: on the same rows, at the peak learning rate."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from shardproof.doctor.checks.check import Check, some
from shardproof.doctor.checks.machine import installed
from shardproof.doctor.checks.rlhf_checks import rewards
from shardproof.doctor.observe import observe
from shardproof.errors import ShardproofError
from shardproof.models.families.anatomy import anatomy, guessed_part
from shardproof.models.families.family import FED_BY, MEDIA
from shardproof.train.options.rlhf_config import draws_answers
from shardproof.train.options.tuners import KINDS, LORA
from shardproof.train.run import Prepared
from shardproof.zero.comm.world import is_first
from shardproof.zero.device import default_device
from shardproof.zero.tensors.parameter import ShardedParameter

AREA, RESULT, ENDED = "trial", "trial.json", "ended-"
STEPS = 3  # two, and a third that shows the loss after them
ROSE = 1.1  # if the loss is higher by this factor after two steps on the same rows, the model is not learning
NORM = 1e4  # a gradient norm above this is implausible
OWN_SIZE = 0.3  # a step that changes the matrices by this share soon destroys them
SAMPLE = 2048  # elements of each parameter's slice that are compared
ADAPTER = re.compile(rf"\.({'|'.join([LORA, 'hada', *KINDS])})_")  # in PEFT's parameter names, after the layer
NETWORK = 16 << 20  # bytes to send for the measurement


def trial(prepared: Prepared, folder: str) -> None:
    """Run the steps on this rank; rank 0 writes its observations, and each rank the error it ended with."""
    try:
        _take_steps(prepared, folder)
    except Exception as error:
        said = str(error) if isinstance(error, ShardproofError) else f"{type(error).__name__}: {error}"
        (Path(folder) / f"{ENDED}{os.environ.get('RANK', '0')}").write_text(said)
        raise


def ended(folder: str, code: int) -> Check:
    """The check for a trial that ended with an exit code: the error of the first rank that failed."""
    told = min(Path(folder).glob(f"{ENDED}*"), key=lambda file: file.stat().st_mtime_ns, default=None)
    said = " ".join(told.read_text().split()) if told else f"ended with exit code {code}; its error is above"
    return Check(AREA, "steps", "fail", said, "The run would end in the same way.", "shardproof explain")


def _take_steps(prepared: Prepared, folder: str) -> None:
    ranks = _ranks()
    seen: dict[str, Any] = {"without": [], "not_finite": [], "apart": [], "steps": 0, "moved": None, **ranks}
    before: dict[int, torch.Tensor] = {}

    def before_a_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedParameter)]
        if not seen["steps"]:
            before.update((id(p), _sample(p.flat.locals[p.index])) for p in params)

    def each(step: int, params: dict[str, ShardedParameter]) -> None:
        grads = {name: p.grad for name, p in params.items()}
        seen["steps"] = step
        if step > 1:
            return
        matrices = [p for p in params.values() if p.dim() > 1 and id(p) in before]
        seen["moved"] = _moved([(before[id(p)], _sample(p.flat.locals[p.index])) for p in matrices])
        seen["without"] = [name for name, grad in grads.items() if grad is None and params[name].requires_grad]
        part_of = anatomy(next(iter(params.values())).flat.engine.model).part_of
        seen["parts"] = {name: part_of.get(name.rpartition(": ")[2], "llm") for name in seen["without"]}
        has = {name: grad is not None for name, grad in grads.items()}
        seen["behind"], seen["unread"] = _behind_features(has, part_of), _unread(has)
        there = {name: grad for name, grad in grads.items() if grad is not None}
        if there:
            norms = torch.stack([g.norm().float() for g in there.values()])
            seen["not_finite"] = [n for n, ok in zip(there, norms.isfinite().tolist(), strict=True) if not ok]
        seen["apart"] = _differing(params)

    handle = register_optimizer_step_pre_hook(before_a_step)
    try:
        scaled = prepared.config.precision == "fp16"
        records = observe(prepared, each)
    finally:
        handle.remove()
    if is_first():
        logged = [r for r in records if "loss" in r]
        seen["losses"] = [_number(r["loss"]) for r in logged]
        norms = [_number(r.get("grad_norm")) for r in logged]
        seen["norms"] = [norm for norm in norms if norm is not None] if scaled else norms
        seen["left_out"] = len(norms) - len(seen["norms"])
        seen["drawn"] = logged if draws_answers(prepared.config) else None
        (Path(folder) / RESULT).write_text(json.dumps(seen))


def _number(value: Any) -> float | None:
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None


def with_each(first: range, kinds: Mapping[str, int]) -> list[int]:
    """The indices of the same number of rows, including a row with each kind of file."""
    wanted = sorted(set(kinds.values()))[: len(first)]
    others = [number for number in first if number not in wanted]
    return sorted(others[: len(first) - len(wanted)] + wanted)


def _sample(held: torch.Tensor) -> torch.Tensor:
    """Some elements of this rank's slice of a parameter."""
    return held.detach().reshape(-1)[:SAMPLE].float().cpu().clone()


def _moved(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float | None:
    """The relative change of the matrices, over all ranks; None if unknown, as for optimizers that update whole
    matrices. Collective."""
    mine = [
        sum(float((after - before).square().sum()) for before, after in pairs),
        sum(float(before.square().sum()) for before, _ in pairs),
    ]
    everyone: list[Any] = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    change, whole = (sum(each[i] for each in everyone) for i in (0, 1))
    return math.sqrt(change / whole) if whole > 0 and math.isfinite(change) else None


def _ranks() -> dict[str, Any]:
    """Clocks, software and network of all ranks."""
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
    """Parameters whose whole values differ between ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    sums = torch.stack([p.whole().double().sum().cpu() for p in params.values()])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sums)
    return [name for i, name in enumerate(params) if len({float(each[i]) for each in everyone}) > 1]


def judge(folder: str, kinds: Collection[str] = MEDIA, tried: Collection[str] | None = None) -> list[Check]:
    """Checks from the observations of `trial`. `kinds`: the kinds of files in rows, from MEDIA; `tried`: the kinds that
    certainly occurred in the trial's steps, by default all."""
    seen = json.loads((Path(folder) / RESULT).read_text())
    checks = [*_judge_ranks(seen), *_judge_scale(seen)]
    if not seen["steps"]:
        return checks
    idle = [name for name in seen["without"] if _waits_for(name, seen["parts"][name], kinds)]
    had = kinds if tried is None else tried
    missed = [name for name in seen["without"] if _waits_for(name, seen["parts"][name], had)]
    behind = [name for name in seen.get("behind", []) if name not in missed]
    unread = [name for name in seen.get("unread", []) if name not in (*missed, *behind)]
    names = [name for name in seen["without"] if name not in (*missed, *behind, *unread)]
    if idle:
        parts = sorted({seen["parts"][name] for name in idle})
        cause = f"No row has a file for them (part: {', '.join(parts)}): they are never updated, and take memory."
        shown = f"none for {len(idle)}: {some(idle)}"
        checks.append(Check(AREA, "unused parts", "warn", shown, cause, f"--freeze {' '.join(parts)}"))
    if behind:
        cause = "They are at the end of a tower whose features are taken from an earlier layer: they are never updated."
        shown, option = (
            f"none for {len(behind)}: {some(behind)}",
            "no change needed; they only take memory",
        )
        checks.append(Check(AREA, "unused layers", "warn", shown, cause, option))
    if unread:
        layers = ", ".join(sorted({_layer(name).rpartition(".")[2] for name in unread}))
        cause = "The model bypasses these layers, or reads their weights directly: the adapters are never updated."
        shown, option = f"none for {len(unread)}: {some(unread)}", f"--target-modules that leaves out {layers}"
        checks.append(Check(AREA, "unused adapters", "warn", shown, cause, option))
    if names:
        cause = "They are trained, but the loss does not depend on them: they are never updated."
        option = "--freeze the part, or check the forward; with reentrant checkpointing: --checkpointing-reentrant no"
        checks.append(Check(AREA, "gradients", "fail", f"none for {len(names)}: {some(names)}", cause, option))
    elif seen["not_finite"]:
        names = seen["not_finite"]
        cause = "The gradient is NaN or infinite in the first step."
        checks.append(
            Check(
                AREA,
                "gradients",
                "fail",
                f"{len(names)}: {some(names)}",
                cause,
                "--precision fp32, and check the loss",
            )
        )
    else:
        which = "every other trained parameter" if missed or unread else "every trained parameter"
        checks.append(Check(AREA, "gradients", "ok", f"{which} has one, and it is finite"))
    drawn = seen["drawn"]
    told = rewards(drawn or [])
    # Then a zero gradient was reported already, or is correct: all answers of the first step had the same reward.
    flat = any(check.status != "ok" for check in told) or (bool(told) and not drawn[0].get("reward_std"))
    return [*checks, *told, *_judge_course(seen["losses"], seen["norms"], seen["moved"], drawn is not None, flat)]


def _behind_features(has_gradient: Mapping[str, bool], part_of: Mapping[str, str]) -> list[str]:
    """The last parameters of towers, after all that have a gradient: features are taken from an earlier layer. Towers
    without any gradient are left out. `part_of` is in the order of the model."""
    found = []
    for tower in ("vision", "audio"):
        names = [name for name, part in part_of.items() if part == tower and name in has_gradient]
        last = max((place for place, name in enumerate(names) if has_gradient[name]), default=len(names))
        found += names[last + 1 :]
    return found


def _unread(has_gradient: Mapping[str, bool]) -> list[str]:
    """Adapters on layers whose name has no gradient in any block, if layers with other names have one."""
    adapters = [name for name in has_gradient if ADAPTER.search(name)]
    called = {_layer(name) for name in adapters if has_gradient[name]}
    return [name for name in adapters if _layer(name) not in called] if called else []


def _layer(name: str) -> str:
    """The path of an adapter's layer without the block index."""
    return ".".join(word for word in ADAPTER.split(name)[0].split(".") if not word.isdigit())


def _waits_for(name: str, part: str, kinds: Collection[str]) -> bool:
    """Whether a parameter waits for files that no row has: any of a part's kinds, or all of the kinds of an aligner."""
    part = guessed_part(name) if part == "aligner" and guessed_part(name) in FED_BY else part
    fed = FED_BY.get(part, ())
    return bool(fed) and not (set(fed) <= set(kinds) if part == "aligner" else set(fed) & set(kinds))


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
        cause = "Times in logs and ages of checkpoints cannot be compared."
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


def _judge_scale(seen: dict[str, Any]) -> list[Check]:
    """For fp16: a step whose gradients are not finite is skipped, and the next one uses half the loss scale."""
    if not seen["left_out"]:
        return []
    shown = f"{seen['left_out']} of {len(seen['losses'])} steps skipped, as their scaled gradients overflow"
    if seen["norms"]:
        return [Check(AREA, "loss scale", "ok", shown)]
    cause = (
        "Each halves the loss scale. These steps cannot show whether it gets small enough, and what a step does then."
    )
    return [Check(AREA, "loss scale", "warn", shown, cause, "--precision bf16, where the device has it")]


def _judge_course(
    losses: list[float | None],
    norms: list[float | None],
    moved: float | None = None,
    drawn: bool = False,
    idle: bool = False,
) -> list[Check]:
    """`moved`: the relative change of the matrices in a step; `drawn`: whether each step trained on its own answers, so
    that losses cannot be compared; `idle`: whether the first step is known to have had nothing to learn."""
    shown = ", ".join("not finite" if loss is None else f"{loss:.3f}" for loss in losses)
    checks = []
    first, last = losses[0], losses[-1]
    smaller = "a --learning-rate 10 to 100 times smaller"
    if first is None or last is None or None in losses:
        cause = "The loss is NaN or infinite."
        option = smaller if first is not None else "--precision fp32, and check the rows and the loss"
        checks.append(Check(AREA, "loss", "fail", shown, cause, option))
    elif not drawn and last > first + (ROSE - 1) * abs(first) + 0.05:
        cause = "After two steps on these same rows the loss is higher than before: the steps are too large."
        checks.append(Check(AREA, "loss", "fail", shown, cause, smaller))
    elif moved is not None and moved > OWN_SIZE:
        shown += f"; a step changes the matrices by {100 * moved:.0f} % of their size"
        cause = "A step at this rate overwrites what the model has learned, whatever the loss is."
        checks.append(Check(AREA, "loss", "fail", shown, cause, smaller))
    elif moved == 0 and not idle:
        cause = "The steps change nothing."
        checks.append(Check(AREA, "loss", "warn", shown, cause, "a larger --learning-rate"))
    else:
        checks.append(
            Check(AREA, "loss", "ok", f"{shown}, each on other answers" if drawn else f"{shown} on the same rows")
        )
    shown = ", ".join("not finite" if norm is None else f"{norm:.3g}" for norm in norms)
    if norms[0] is None or norms[0] > NORM or (norms[0] == 0 and not idle):
        cause = (
            "A gradient norm like this comes from a loss that is not a mean, from NaN or inf, or from an untrained "
            "model."
        )
        checks.append(Check(AREA, "gradient norm", "fail", shown, cause, "check the loss; --precision fp32"))
    else:
        checks.append(Check(AREA, "gradient norm", "ok", shown))
    return checks
