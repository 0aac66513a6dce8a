"""Whether a run gives the numbers of one process: the first step and parameter at which they part."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardproof
from shardproof.doctor.observe import observe
from shardproof.train.run import Prepared
from shardproof.zero.parameter import ShardedParameter

TOLERANCE = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 5e-2}  # what rounding makes of another order of sums
NOISE = 1e-3  # a gradient below this share of the largest of all is rounding (the bias of keys has none in theory)
RESULT, LOSSES = "result.json", "losses.json"
MOST = 20  # differences that are kept


@dataclass(frozen=True)
class Difference:
    """Where two runs part: by how much at most, and what the largest value there is."""

    step: int
    name: str
    what: str
    off: float
    largest: float

    def __str__(self) -> str:
        share = f"{self.off / self.largest:.1e} of the largest, {self.largest:.1e}" if self.largest else "where it is 0"
        return f"step {self.step}: the {self.what} of '{self.name}' differs by {self.off:.1e} ({share})"


@dataclass(frozen=True)
class Verdict:
    """What came out.

    Attributes:
        compared: how many parameters in each of `steps` steps.
        losses: of both runs, by step.
        differences: in order; empty if the runs are equal.
        dropout: what drops at random, which no two runs do alike.
    """

    steps: int
    compared: int
    losses: list[tuple[float, float]]
    differences: list[Difference]
    dropout: list[str]


Values = dict[str, torch.Tensor]


def tolerance_of(config: Any) -> float:
    """What was asked for, or what the precision of the run allows."""
    return TOLERANCE[config.precision] if config.tolerance is None else float(config.tolerance)


def values_of(params: dict[str, ShardedParameter]) -> tuple[Values, Values]:
    """Whole gradients and whole weights, in master dtype, on the CPU. Collective; other ranks than 0 get no weights."""
    engine = next(iter(params.values())).flat.engine
    gradients = {}
    for name, p in params.items():
        if p.grad is not None:
            gradients[name] = p.grad.whole().detach().cpu().clone()  # type: ignore[attr-defined]
    whole = shardproof.full_state_dict(engine.model)
    return gradients, {name: whole[name] for name in params if name in whole}


def write_reference(prepared: Prepared, folder: str) -> None:
    """Run in one process, and write what every step gives."""

    def each(step: int, params: dict[str, ShardedParameter]) -> None:
        torch.save(values_of(params), Path(folder) / f"{step}.pt")

    records = observe(prepared, each)
    (Path(folder) / LOSSES).write_text(json.dumps([r["loss"] for r in records if "loss" in r]))


def compare(prepared: Prepared, folder: str, tolerance: float, deterministic: bool) -> None:
    """Run on this rank of several, and compare with what `write_reference` wrote. Rank 0 writes the result."""
    found: list[Difference] = []
    compared = 0
    dropout: list[str] = []

    def each(step: int, params: dict[str, ShardedParameter]) -> None:
        nonlocal compared, dropout
        gradients, weights = values_of(params)
        if not _first():
            return
        engine = next(iter(params.values())).flat.engine
        dropout = dropping(engine.model)
        reference = torch.load(Path(folder) / f"{step}.pt", weights_only=True)
        compared = len(params)
        found.extend(differences(step, (gradients, weights), reference, 0.0 if deterministic else tolerance))

    records = observe(prepared, each)
    if _first():
        losses = json.loads((Path(folder) / LOSSES).read_text())
        pairs = list(zip(losses, [r["loss"] for r in records if "loss" in r], strict=True))
        verdict = Verdict(len(pairs), compared, pairs, found[:MOST], dropout)
        (Path(folder) / RESULT).write_text(json.dumps(dataclasses.asdict(verdict)))


def dropping(model: nn.Module) -> list[str]:
    """What of a model drops at random: modules, and values of its config that its functions take (attention)."""
    modules = [name for name, m in model.named_modules() if getattr(m, "p", 0.0) and "Dropout" in type(m).__name__]
    told: Any = getattr(model, "config", None)
    values = told.to_dict() if hasattr(told, "to_dict") else {}
    nested = [values, *(value for value in values.values() if isinstance(value, dict))]
    keys = {str(key) for each in nested for key, value in each.items() if value}
    drops = sorted(key for key in keys if key.endswith(("dropout", "_pdrop")))
    return modules or [f"{key} of config.json" for key in drops]


def read_verdict(folder: str) -> Verdict:
    """What `compare` wrote."""
    fields: dict[str, Any] = json.loads((Path(folder) / RESULT).read_text())
    found = [Difference(**one) for one in fields.pop("differences")]
    return Verdict(**{**fields, "losses": [tuple(pair) for pair in fields["losses"]], "differences": found})


def differences(
    step: int, mine: tuple[Values, Values], reference: tuple[Values, Values], tolerance: float
) -> list[Difference]:
    """Where gradients differ, and weights where the gradient is no rounding error, in the order of the parameters.

    The first step of Adam moves every weight by the learning rate in the direction of its gradient's sign, whatever its
    size; so weights whose gradient is noise say nothing, except with a tolerance of 0.
    """
    (gradients, weights), (old_gradients, old_weights) = mine, reference
    most = max((float(g.abs().max()) for g in old_gradients.values() if g.numel()), default=0.0)
    floor = NOISE * most if tolerance else 0.0
    found = []
    for name in {**old_weights, **weights}:
        got, known = gradients.get(name), old_gradients.get(name)
        if (got is None) != (known is None):
            there = "here only" if known is None else "in one process only"
            found.append(Difference(step, name, f"gradient (there is one {there})", math.inf, 0.0))
            continue
        if got is not None and known is not None:
            off, largest = _off(got, known), float(known.abs().max())
            if off > tolerance * max(largest, floor):
                found.append(Difference(step, name, "gradient", off, largest))
        seen = torch.ones_like(weights[name], dtype=torch.bool) if known is None else known.abs() >= floor
        off, largest = _off(weights[name][seen], old_weights[name][seen]), float(old_weights[name].abs().max())
        if off > tolerance * largest:
            found.append(Difference(step, name, "weight", off, largest))
    return found


def _off(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; inf where only one is not finite."""
    if not a.numel():
        return 0.0
    off = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return float(torch.nan_to_num(off, nan=math.inf, posinf=math.inf).max())


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
