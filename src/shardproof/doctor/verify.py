"""Whether a run matches a single process, or the first step and parameter at which they differ."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardproof
from shardproof.doctor.observe import observe
from shardproof.train.options.config import GALORE, MUON
from shardproof.train.run import Prepared
from shardproof.zero.comm.world import is_first
from shardproof.zero.tensors.parameter import ShardedParameter

TOLERANCE = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 5e-2}  # the effect of rounding with another order of sums
RESULT, LOSSES = "result.json", "losses.json"
MOST = 20  # differences to keep


@dataclass(frozen=True)
class Allowed:
    """The allowed differences in one step of two equal runs.

    [Note: what rounding does not do]
    Rounding in half precision moves single elements by a percent, some up and some down. So means over very many of
    them hardly move: the loss, the norm of all gradients, and the length of a parameter's gradient in the direction of
    the other run's. A factor, such as a number of tokens that is off by 0.4 %, moves exactly these. From the second
    step on, weights differ in their last bits, which may be many percent of a small gradient.

    Attributes:
        element: for any element of a gradient or weight, relative to the largest of its parameter; for a gradient,
            relative to at least `floor` times the largest of all gradients.
        noise: a gradient below this share of the largest of all is rounding (in theory the bias of keys has none);
            below `steer` of the largest of its parameter, so may be its sign, by which Adam moves a weight.
        loss: relative to the loss; `norm`: relative to the norm of all gradients.
        scale: for the length of a gradient in the direction of the other; None if it is not compared.
        together: for all elements of a weight, relative to their norm; None if single elements are compared. A step of
            Muon gives the small directions of a gradient, which are rounding, as much weight as the large ones: with a
            gradient that is off by a thousandth, all elements together are off by a tenth, and single ones by a third.
    """

    element: float = 0.0
    floor: float = 0.0
    noise: float = 0.0
    steer: float = 0.0
    loss: float = math.inf
    norm: float = math.inf
    scale: float | None = None
    together: float | None = None

    @classmethod
    def by(cls, config: Any, step: int) -> Allowed:
        """What the precision of a run allows in `step`, in proportion to the requested tolerance."""
        asked = 0.0 if getattr(config, "deterministic", False) else tolerance_of(config)
        times = asked / TOLERANCE[config.precision]
        if not times:
            return cls()
        allow = partial(cls, asked, noise=1e-3, together=6 * asked if config.optimizer == MUON else None)
        if config.precision == "fp32":
            return allow(floor=1e-3, loss=1e-4 * times, norm=1e-4 * times)
        if step == 1:
            means = {"loss": 1e-3 * times, "norm": 2e-3 * times, "scale": 3e-3 * times}
            return allow(floor=1e-3, steer=2e-1, **means)
        loss = 1e-2 if hasattr(config, "rlhf_type") else 1e-3  # some of TRL's losses are computed in half precision
        return allow(floor=1e-1, steer=2e-1, loss=loss * times, norm=1e-2 * times)


@dataclass(frozen=True)
class Difference:
    """A difference between two runs: its maximum, and the largest value there. `name` is that of a parameter, or
    empty."""

    step: int
    name: str
    what: str
    off: float
    largest: float

    def __str__(self) -> str:
        whole = "the largest" if self.what in ("gradient", "weight") else "it"
        share = f"{self.off / self.largest:.1e} of {whole}, {self.largest:.1e}" if self.largest else "where it is 0"
        if math.isinf(self.off) and "(" not in self.what:
            share = "not finite in one of the two"
        of = f" of '{self.name}'" if self.name else ""
        return f"step {self.step}: the {self.what}{of} differs by {self.off:.1e} ({share})"


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        compared: the number of parameters compared in each of `steps` steps.
        losses: the losses of both runs, by step.
        differences: in order; empty if the runs are equal.
        dropout: sources of randomness, which differ between any two runs.
        left_out: the steps that both runs have skipped because of the loss scale.
        parted: the first step that only one of them has skipped: from there on the weights are from different steps,
            and nothing is compared.
    """

    steps: int
    compared: int
    losses: list[tuple[float, float]]
    differences: list[Difference]
    dropout: list[str]
    left_out: list[int] = field(default_factory=list)
    parted: int | None = None


Values = dict[str, torch.Tensor]


def tolerance_of(config: Any) -> float:
    """The requested tolerance, or that of the run's precision. Muon orthogonalises matrices in bf16, and if a gradient
    is equally large in several directions, rounding decides which of them GaLore takes."""
    if config.tolerance is not None:
        return float(config.tolerance)
    least = {MUON: "bf16", GALORE: "fp16"}.get(config.optimizer, config.precision)
    return max(TOLERANCE[config.precision], TOLERANCE[least])


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
    """Run in one process, and write the results of every step."""

    records: list[dict[str, Any]] = []

    def each(step: int, params: dict[str, ShardedParameter]) -> None:
        torch.save(values_of(params), _reference(folder, _this_step(records)))

    observe(prepared, each, records)
    (Path(folder) / LOSSES).write_text(json.dumps(_logged(records)))


def _reference(folder: str, step: int) -> Path:
    return Path(folder) / f"{step}.pt"


def _this_step(records: list[dict[str, Any]]) -> int:
    """The step of an update, on rank 0: earlier steps are logged, whether skipped or not."""
    return len(_logged(records)) + 1


def _logged(records: list[dict[str, Any]]) -> list[tuple[float, float | None]]:
    """The loss and the norm of all gradients, before clipping, of each step."""
    return [(r["loss"], r["grad_norm"]) for r in records if "loss" in r]


def compare(prepared: Prepared, folder: str) -> None:
    """Run on this rank of several, and compare with the results of `write_reference`. Rank 0 writes the verdict."""
    found: list[Difference] = []
    steered: Values = {}
    compared = 0
    dropout: list[str] = []
    records: list[dict[str, Any]] = []
    taken: set[int] = set()

    def each(count: int, params: dict[str, ShardedParameter]) -> None:
        nonlocal compared, dropout
        gradients, weights = values_of(params)
        if not is_first():
            return
        engine = next(iter(params.values())).flat.engine
        dropout = dropping(engine.model)
        step = _this_step(records)
        taken.add(step)
        if not _reference(folder, step).exists():
            return
        reference = torch.load(_reference(folder, step), weights_only=True)
        compared = len(params)
        allowed = Allowed.by(prepared.config, count)
        found.extend(differences(step, (gradients, weights), reference, allowed, steered))

    observe(prepared, each, records)
    if is_first():
        pairs = list(zip(json.loads((Path(folder) / LOSSES).read_text()), _logged(records), strict=True))
        for step, (alone, together) in enumerate(pairs, 1):
            found.extend(drifts(step, alone, together, Allowed.by(prepared.config, step)))
        losses = [(alone[0], together[0]) for alone, together in pairs]
        verdict = judged(losses, compared, found, dropout, taken, folder)
        (Path(folder) / RESULT).write_text(json.dumps(dataclasses.asdict(verdict)))


def judged(
    losses: list[tuple[float, float]],
    compared: int,
    found: list[Difference],
    dropout: list[str],
    taken: Collection[int],
    folder: str,
) -> Verdict:
    """`found`: the differences in all steps, of which only those before the runs part count; `taken`: the steps of this
    run."""
    steps = range(1, len(losses) + 1)
    alone = {step for step in steps if _reference(folder, step).exists()}
    parted = next((step for step in steps if (step in alone) != (step in taken)), None)
    before = [step for step in steps if parted is None or step < parted]
    left_out = [step for step in before if step not in alone]
    told = sorted((one for one in found if one.step in before), key=lambda one: one.step)
    return Verdict(len(before) - len(left_out), compared, losses, told[:MOST], dropout, left_out, parted)


def drifts(step: int, alone: Any, together: Any, allowed: Allowed) -> list[Difference]:
    """The differences in loss and norm of a step, between one process and several, beyond `allowed`."""
    kinds = zip(("loss", "norm of all gradients"), alone, together, (allowed.loss, allowed.norm), strict=True)
    found = []
    for what, a, b, share in kinds:
        if a is None or b is None or not (math.isfinite(a) or math.isfinite(b)):
            continue
        both = math.isfinite(a) and math.isfinite(b)
        off, of = (abs(b - a), abs(a)) if both else (math.inf, abs(a if math.isfinite(a) else b))
        if off > share * of or not both:
            found.append(Difference(step, "", what, off, of))
    return found


def dropping(model: nn.Module) -> list[str]:
    """The sources of randomness in a model: dropout modules, dropout values in its config that its functions use
    (attention), and the noise of --neftune-noise-alpha."""
    modules = [name for name, m in model.named_modules() if getattr(m, "p", 0.0) and "Dropout" in type(m).__name__]
    told: Any = getattr(model, "config", None)
    values = told.to_dict() if hasattr(told, "to_dict") else {}
    nested = [values, *(value for value in values.values() if isinstance(value, dict))]
    keys = {str(key) for each in nested for key, value in each.items() if value}
    drops = sorted(key for key in keys if key.endswith(("dropout", "_pdrop")))
    noise = [f"NEFTune's noise on {name}" for name, m in model.named_modules() if hasattr(m, "neftune_noise_alpha")]
    return [*noise, *(modules or [f"{key} of config.json" for key in drops])]


def read_verdict(folder: str) -> Verdict:
    """Read the verdict that `compare` wrote."""
    fields: dict[str, Any] = json.loads((Path(folder) / RESULT).read_text())
    found = [Difference(**one) for one in fields.pop("differences")]
    return Verdict(**{**fields, "losses": [tuple(pair) for pair in fields["losses"]], "differences": found})


def differences(
    step: int, mine: tuple[Values, Values], reference: tuple[Values, Values], allowed: Allowed, steered: Values
) -> list[Difference]:
    """Differences in gradients, and in weights whose gradients have not been rounding so far, in the order of the
    parameters.

    The first step of Adam moves every weight by the learning rate in the direction of its gradient's sign, whatever its
    size; so weights whose gradient is noise tell nothing, except if nothing may differ.

    Args:
        steered: by name, which elements had gradients above rounding in earlier steps. Kept up to date.
    """
    (gradients, weights), (old_gradients, old_weights) = mine, reference
    most = max(map(_largest, old_gradients.values()), default=0.0)
    found = []
    for name in {**old_weights, **weights}:
        if not old_weights[name].numel():
            continue
        got, known = gradients.get(name), old_gradients.get(name)
        if (got is None) != (known is None):
            there = "here only" if known is None else "in one process only"
            found.append(Difference(step, name, f"gradient (there is one {there})", math.inf, 0.0))
            continue
        if got is not None and known is not None:
            off, largest = _off(got, known), _largest(known)
            if off > allowed.element * max(largest, allowed.floor * most):
                found.append(Difference(step, name, "gradient", off, largest))
            elif allowed.scale is not None and largest >= allowed.noise * most > 0.0:
                more, error = _longer(got, known)
                if abs(more) > allowed.scale + 4 * error:
                    length = float(known.norm())
                    found.append(Difference(step, name, "length of the gradient", abs(more) * length, length))
        seen = steered.get(name, torch.ones_like(weights[name], dtype=torch.bool))
        if known is not None:
            sure = max(allowed.noise * most, allowed.steer * _largest(known))
            seen = steered[name] = seen & (known.abs() >= sure)
        got, known = weights[name][seen], old_weights[name][seen]
        if allowed.together is not None:
            off, norm = _off((got - known).norm(), torch.zeros(())), float(known.norm())
            if off > allowed.together * norm:
                found.append(Difference(step, name, "weight as a whole", off, norm))
            continue
        off, largest = _off(got, known), _largest(old_weights[name])
        if off > allowed.element * largest:
            found.append(Difference(step, name, "weight", off, largest))
    return found


def _longer(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """The relative amount by which `a` is longer than `b`, in the direction of `b`, and its error if elements are off
    independently at random."""
    a, b = a.double().flatten(), b.double().flatten()
    square = float(b @ b)
    times = float(a @ b) / square
    rest = a - times * b
    return times - 1.0, math.sqrt(float(rest @ rest) / square / len(b))


def _largest(values: torch.Tensor) -> float:
    """The largest finite value: nothing is a share of the others."""
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _off(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; inf if only one of the two is not finite."""
    if not a.numel():
        return 0.0
    off = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return float(torch.nan_to_num(off, nan=math.inf, posinf=math.inf).max())
