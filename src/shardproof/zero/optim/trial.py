"""Which optimizers may see slices: found by a trial on small tensors, before the first step.

[Note: tried, not listed] A rank's optimizer sees only a slice of each parameter. That is enough for an element-wise
update, like Adam's, and silently wrong for one that uses the norm of a gradient. Names say little about it: a subclass
of AdamW may clip each tensor. So the optimizer's own step runs on small tensors, whole and cut in two, as ranks would
hold them. If the results differ, its parameters are updated whole (owners.py); if they also depend on other parameters,
it cannot be sharded.
"""

from __future__ import annotations

import inspect
import io
import pickle
import sys
import types
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer
from torch.overrides import TorchFunctionMode

from shardproof.zero.tensors.parameter import ShardedTensor, written_on

# Size of gradients in each step: some above, some below common clipping thresholds. RAdam begins after five steps.
_STEPS = (1.0, 30.0, 0.01, 5.0) * 3
_ROUNDING = 1e-5  # relative to how far values move; a hundred optimizers were below 4e-7, or above 4e-5
_LARGEST = 4096  # elements of a tensor that an optimizer may keep beside its state: a table, but not a parameter
_DEALT = {"all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"}  # of torch.distributed
_OWN = {"state", "param_groups", "grad_scale", "found_inf"}  # of this instance, and of this step

Values = list[list[torch.Tensor]]  # for each group, what is in the place of its parameters
Tracks = list[list[torch.Tensor]]  # values and then the gradients of each step: (1 + steps, *shape)


class Verdict(NamedTuple):
    """The result of a trial.

    Attributes:
        whole: the numbers of the groups whose parameters need to be updated whole.
        across: whether the update of a parameter depends on other parameters.
        untried: why the trial was not possible, otherwise "".
    """

    whole: frozenset[int] = frozenset()
    across: bool = False
    untried: str = ""


class _Untried(Exception):
    pass


class _OnStandIns(TorchFunctionMode):
    """Guards against a step that also holds parameters in a closure (PEFT's Riemannian one): it would write to the
    model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, ShardedTensor) for t in types):
            raise _Untried("its step has parameters beside those in its groups")
        return func(*args, **(kwargs or {}))


def dealing(optimizer: Optimizer) -> str:
    """The collective with which an optimizer's own `step` combines work that it distributed over ranks, otherwise
    ""."""
    code = getattr(inspect.unwrap(type(optimizer).step), "__code__", None)
    return next((name for name in getattr(code, "co_names", ()) if name in _DEALT), "")


def tried(optimizer: Optimizer) -> Verdict:
    """The verdict on an unknown optimizer. The same on all ranks; the optimizer itself is not changed. (Global hooks on
    the steps of all optimizers see the steps of a trial, too.)"""
    known: dict[str, Verdict] = optimizer.__dict__.setdefault("_shardproof_tried", {})
    groups = [[len(group["params"]), *_switches(group)] for group in optimizer.param_groups]
    if (now := repr(groups)) not in known:
        known[now] = _try(optimizer)
    return known[now]


def _switches(group: dict[str, Any]) -> list[Any]:
    """Options that are not numbers: numbers may change from step to step."""
    return [value for value in group.values() if value is None or isinstance(value, (bool, str))]


def _try(optimizer: Optimizer) -> Verdict:
    try:
        first: Any = next(p for group in optimizer.param_groups for p in group["params"])
        device = getattr(first, "flat", first).device  # of its slices, which may lie in host memory
        index, kind = ([], "cuda") if device.type == "cpu" else ([device.index or 0], device.type)
        with ExitStack() as around:
            around.enter_context(torch.random.fork_rng(index, device_type=kind))
            around.enter_context(warnings.catch_warnings(action="ignore"))
            if "torch._dynamo" in sys.modules:  # a compiled step would be compiled once more for each shape
                around.enter_context(torch.compiler.set_stance("force_eager"))
            return _compare(optimizer, device)
    except Exception as e:  # of any optimizer, about anything
        return Verdict(untried=str(e) if isinstance(e, _Untried) else f"{type(e).__name__}: {e}")


def _compare(optimizer: Optimizer, device: torch.device) -> Verdict:
    generator, alike = torch.Generator().manual_seed(0), _alike(optimizer)
    stepped = partial(_stepped, optimizer, alike)
    groups = _first_of(optimizer, alike)
    whole: Tracks = [[_track(shape, generator).to(device) for shape, _ in _kinds(g["params"])] for g in groups]
    others = [torch.full((1 + len(_STEPS), 16, 16), 3.0, device=device)]
    expected, again = stepped(whole), stepped(whole)
    crowded = stepped([[*others, *g, *others] for g in whole], before=1)  # some go by their place in the group
    noise = [max(_ROUNDING, 10 * far) for far in _apart(whole, expected, again)]
    across = any(far > noise[number] for number, far in enumerate(_apart(whole, expected, [g[1:] for g in crowded])))
    wants_whole = {
        number for number, far in enumerate(_cut_apart(stepped, whole, expected)) if not far <= noise[number]
    }
    if any(level > _ROUNDING for number, level in enumerate(noise) if number not in wants_whole):
        raise _Untried("its step is random")
    return Verdict(frozenset(group for group, number in enumerate(alike) if number in wants_whole), across)


def _alike(optimizer: Optimizer) -> list[int]:
    """A number for each group, shared by groups with the same options and kinds of parameters, which are tried only
    once."""
    numbers: dict[str, int] = {}
    names = [
        repr((_kinds(group["params"]), {k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr")}))
        for group in optimizer.param_groups
    ]
    return [numbers.setdefault(name, len(numbers)) for name in names]


def _first_of(optimizer: Optimizer, alike: list[int]) -> list[dict[str, Any]]:
    """The first group for each number in `alike`."""
    return [optimizer.param_groups[alike.index(number)] for number in range(max(alike) + 1)]


def _cut_apart(stepped: Callable[[Tracks], Values], whole: Tracks, expected: Values) -> list[float]:
    """The distance from `expected` to the result of two ranks on their slices."""
    try:
        slices = [
            stepped([[track.flatten(1).tensor_split([_cut(track)], 1)[rank] for track in group] for group in whole])
            for rank in range(2)
        ]
    except Exception:  # it takes matrices only
        return [float("inf")] * len(whole)
    joined = [[torch.cat(pieces) for pieces in zip(*groups, strict=True)] for groups in zip(*slices, strict=True)]
    return _apart(whole, expected, joined)


def _cut(track: torch.Tensor) -> int:
    """Elements of the first of two slices."""
    return int(0.4 * track[0].numel())


def _kind(p: torch.Tensor) -> tuple[int, dict[str, Any]]:
    """The dimensions of a parameter, and attributes that a user has set on it for an optimizer to read."""
    return max(1, p.dim()), written_on(p)


def _kinds(params: list[torch.Tensor]) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
    """A shape for each kind of parameter, and its attributes. Matrices come tall, wide and large, as some optimizers
    treat these differently."""
    found = sorted({repr(kind): kind for kind in map(_kind, params)}.items())
    return [(shape, on) for _, (d, on) in found for shape in _shapes(d)]


def _shapes(dims: int) -> list[tuple[int, ...]]:
    if dims == 2:
        return [(6, 8), (8, 6), (160, 130)]
    return [(48,) if dims == 1 else (*(2,) * (dims - 2), 6, 8)]


def _track(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Values and the gradients of each step, one after the other. Gradients grow towards the end of the tensor."""
    track = torch.randn(1 + len(_STEPS), *shape, generator=generator)
    ramp = torch.linspace(0.1, 10, track[0].numel()).view(shape)
    for gradient, size in zip(track[1:], _STEPS, strict=True):
        gradient *= ramp * size
    return track


def _apart(start: Tracks, expected: Values, found: Values) -> list[float]:
    """For each group, the distance between two results, relative to how far values have moved."""
    groups = []
    for tracks, wanted, given in zip(start, expected, found, strict=True):
        far = [0.0]
        for track, a, b in zip(tracks, wanted, given[: len(wanted)], strict=True):
            moved = float((a - track[0]).abs().max())
            if not 0 < moved < float("inf"):
                raise _Untried("its first steps change nothing" if moved == 0 else "it gave NaN or infinity")
            far.append(float((a.flatten() - b.flatten()).abs().max()) / moved)
        groups.append(max(far))
    return groups


def _stepped(optimizer: Optimizer, alike: list[int], tracks: Tracks, before: int = 0) -> Values:
    """The values after steps of a new optimizer like `optimizer` with these gradients. `alike`: see `_alike`; there are
    tracks for each number in it, the first `before` of which stand for no parameter.
    """
    values = [[track[0].clone().requires_grad_() for track in group] for group in tracks]
    twin = object.__new__(type(optimizer))
    stand_ins: dict[int, Any] = {id(optimizer): twin}
    groups = _first_of(optimizer, alike)
    for group, number in zip(optimizer.param_groups, alike, strict=True):
        mine, kinds = values[number][before:], _kinds(group["params"])
        for value, (_, on) in zip(mine, kinds, strict=False):
            value.__dict__.update(on)
        of_kind = [repr((len(shape), on)) for shape, on in kinds]
        stand_ins.update((id(p), mine[of_kind.index(repr(_kind(p)))]) for p in group["params"])
    kept = {
        k: v
        for k, v in optimizer.__dict__.items()
        if k not in _OWN and not k.startswith(("_shardproof", "_optimizer_"))
    }
    methods = {name for name in kept if callable(getattr(type(optimizer), name, None))}  # a scheduler's own `step`
    twin.__dict__.update(_copied({k: v for k, v in kept.items() if k not in methods}, stand_ins))
    twin.__dict__.update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    twin.state, twin.param_groups = defaultdict(dict), []
    if not optimizer.__dict__.get("_shardproof_steps"):  # state that was made with the optimizer
        for group, mine in zip(groups, values, strict=True):
            made: dict[str, Any] = next((optimizer.state[p] for p in group["params"] if p in optimizer.state), {})
            twin.state.update((v, {name: _like(value, v) for name, value in made.items()}) for v in mine if made)
    for group, mine in zip(groups, values, strict=True):
        options = _copied({k: v for k, v in group.items() if k != "params"}, stand_ins)
        twin.param_groups.append({**options, **_visible(options), "params": list(mine)})
    if callable(getattr(twin, "train", None)):  # see "optimizers with modes"
        twin.train()  # type: ignore[attr-defined]
    for number in range(1, 1 + len(_STEPS)):
        for mine, given in zip(values, tracks, strict=True):
            for value, track in zip(mine, given, strict=True):
                value.grad = track[number].clone()
        with _OnStandIns():
            type(optimizer).step(twin)
    return [[value.detach() for value in group] for group in values]


def _like(value: Any, stand_in: torch.Tensor) -> Any:
    """State of a parameter as that of its stand-in: in its shape, filled with one number."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(stand_in, float(value.flatten()[0])).detach() if value.dim() else value.clone()
    return value


def _visible(options: dict[str, Any]) -> dict[str, Any]:
    """A learning rate that is not zero, as it may be at the beginning of a warm-up, and a decay above rounding
    error."""
    rate, decay = options.get("lr"), options.get("weight_decay")
    new: dict[str, Any] = {"weight_decay": 0.1} if decay else {}
    if rate is not None:
        new["lr"] = torch.full_like(rate, 1e-2) if isinstance(rate, torch.Tensor) else 1e-2
    return new


def _copied(values: dict[str, Any], stand_ins: dict[int, Any]) -> dict[str, Any]:
    """A copy of an optimizer's attributes, in which other objects replace its parameters and itself."""
    kept: list[Any] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> int | None:
            known = id(value) in stand_ins
            if isinstance(value, torch.nn.Module) or (
                isinstance(value, torch.Tensor) and not known and value.numel() > _LARGEST
            ):
                raise _Untried(f"it keeps a {type(value).__name__}")
            by_name = isinstance(value, types.ModuleType) or callable(value)
            if not known and (not by_name or isinstance(value, types.MethodType)):
                return None
            kept.append(stand_ins.get(id(value), value))
            return len(kept) - 1

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: int) -> Any:
            return kept[number]

    file = io.BytesIO()
    Pickler(file, pickle.HIGHEST_PROTOCOL).dump(values)
    file.seek(0)
    return Unpickler(file).load()  # type: ignore[no-any-return]
