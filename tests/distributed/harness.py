"""One process on the whole batch is the reference; ranks on slices of it must give the same.

A `Case` says how to build a model, what a batch is, what a step does with both. `train` runs it as one plain process,
or as a rank of many under any engine; `compare` holds the two records against each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

TOLERANCE = 1e-6  # of the largest magnitude in a tensor, at least of 1: what fp32 sums in another order may differ by


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """What the engine's logger says on this rank."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("shardproof")
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


# -- engines: what happens to a model before it trains -----------------------------------------------------------------


class Alone:
    """One process, plain torch: the reference."""

    rank, world = 0, 1

    def shard(self, model: nn.Module, **options: Any) -> None:
        pass

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def whole(self, model: nn.Module, **options: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def before_step(self, models: dict[str, nn.Module]) -> None:
        pass

    def state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return model.state_dict()


class Sharded(Alone):
    """`shardproof.shard` at one stage, over the default group if there is one."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        if dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def shard(self, model: nn.Module, **options: Any) -> None:
        import shardproof

        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        kind = type(model)
        assert shardproof.shard(model, self.stage, **options) is model
        assert type(model) is kind
        assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        import shardproof

        return shardproof.no_sync(model)

    def whole(self, model: nn.Module, **options: Any) -> contextlib.AbstractContextManager[Any]:
        import shardproof

        return shardproof.whole(model, **options)

    def state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        import shardproof

        return shardproof.full_state_dict(model, rank0_only=False)


class Averaged(Alone):
    """The plainest data parallelism: all-reduce every gradient before the step. It proves the harness, not the engine.

    `scale` other than 1 is a wrong engine, which the harness must notice.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.rank, self.world, self.scale = dist.get_rank(), dist.get_world_size(), scale

    def before_step(self, models: dict[str, nn.Module]) -> None:
        params = {id(p): p for model in models.values() for p in model.parameters()}.values()
        for p in params:
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()
            if p.grad is not None and p.grad.is_conj():
                p.grad = p.grad.resolve_conj()
        grads = [torch.view_as_real(p.grad) if p.is_complex() else p.grad for p in params if p.grad is not None]
        if not grads:  # a forward pass without a backward pass
            return
        flat = torch.cat([grad.double().flatten() for grad in grads])
        dist.all_reduce(flat)
        flat.mul_(self.scale / self.world)
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))


# -- cases -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Env:
    """What a step may know: which step it is, and the engine it runs under."""

    engine: Alone
    k: int = 0
    optimizer: torch.optim.Optimizer | None = None
    keep: dict[str, Any] = dataclasses.field(default_factory=dict)  # what a step wants to find again at the next

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        return self.engine.no_sync(model)

    def whole(self, model: nn.Module, **options: Any) -> contextlib.AbstractContextManager[Any]:
        return self.engine.whole(model, **options)


def adamw(params: Any) -> torch.optim.Optimizer:
    """Weight decay, so that a parameter without gradient that is touched shows; eps keeps noise on zeros small."""
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-4)


def rows(k: int, n: int) -> dict[str, torch.Tensor]:
    """The global batch of step `k`: n rows of 6 features and 3 targets."""
    generator = torch.Generator().manual_seed(1000 + k)
    return {"x": torch.randn(n, 6, generator=generator), "y": torch.randn(n, 3, generator=generator)}


def mse_step(env: Env, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
    loss.backward()
    return loss


@dataclasses.dataclass(frozen=True)
class Case:
    """A graph to train.

    Args:
        build: makes the model (or a dict of models, each sharded by itself). The seed is set before.
        step: forward and backward of one step; returns the scalars whose mean over ranks must equal one process's.
        rows: the global batch of step k.
        optimizer: made from all parameters.
        steps: how many.
        clip: maximum of the global gradient norm; the norm itself is compared. None: no clipping.
        sharded: called with the models right after sharding (or right after building, in the reference).
        options: given to `shard`.
        skip_grads: do not look at gradients between backward and step.
        tolerance: of the scale of each tensor.
        set_to_none: for zero_grad.
        bits: whether one rank adds in the order of plain torch, so that it gives the same bits.
    """

    build: Callable[[], Any]
    step: Callable[[Env, Any, dict[str, torch.Tensor]], Any] = mse_step
    rows: Callable[[int, int], dict[str, torch.Tensor]] = rows
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    steps: int = 3
    batch: int = 8
    clip: float | None = 0.1
    sharded: Callable[[Env, Any], None] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    skip_grads: bool = False
    tolerance: float = TOLERANCE
    set_to_none: bool = True
    bits: bool = True


@dataclasses.dataclass
class Record:
    """What a run produced, step by step."""

    losses: list[list[float]] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    grads: list[dict[str, float | None]] = dataclasses.field(default_factory=list)  # norm of each; None: no gradient
    states: list[dict[str, torch.Tensor]] = dataclasses.field(default_factory=list)


def _models(built: Any) -> dict[str, nn.Module]:
    return built if isinstance(built, dict) else {"": built}


def _slice(batch: Any, rank: int, world: int) -> Any:
    if isinstance(batch, dict):
        return {name: _slice(value, rank, world) for name, value in batch.items()}
    n = batch.shape[0]
    assert n % world == 0
    return batch[rank * n // world : (rank + 1) * n // world]


def _named(models: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for key, model in models.items():
        for name, p in model.named_parameters():
            yield (f"{key}.{name}" if key else name), p


def _gradient_norms(models: dict[str, nn.Module]) -> dict[str, float | None]:
    grads = {name: p.grad for name, p in _named(models)}
    there = [grad for grad in grads.values() if grad is not None]
    # In float64: what plain torch returns in the dtype of the gradient is rounded to it.
    norms = iter(torch.stack(list(torch._foreach_norm(there, 2, torch.float64))).tolist() if there else ())
    return {name: None if grad is None else next(norms) for name, grad in grads.items()}


def _full_state(engine: Alone, models: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    full = {}
    for key, model in models.items():
        for name, value in engine.state(model).items():
            assert type(value) in (torch.Tensor, nn.Parameter), f"{name} is a {type(value)}"
            full[f"{key}.{name}" if key else name] = value.detach().clone()
    return full


def _mean_over_ranks(values: list[float], world: int) -> list[float]:
    if world == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / world).tolist()


def train(case: Case, engine: Alone) -> Record:
    """Train the case under `engine`; this rank's slice of each batch, the mean over ranks of each loss."""
    torch.manual_seed(7)
    built = case.build()
    models = _models(built)
    env = Env(engine)
    for model in models.values():
        engine.shard(model, **case.options)
    parameters = {id(p): p for _, p in _named(models)}
    env.optimizer = case.optimizer(list(parameters.values()))
    if case.sharded is not None:
        case.sharded(env, built)
    record = Record()
    for env.k in range(case.steps):
        torch.manual_seed(100 + env.k)
        batch = _slice(case.rows(env.k, case.batch), engine.rank, engine.world)
        losses = case.step(env, built, batch)
        losses = [float(torch.as_tensor(loss).detach()) for loss in (losses if isinstance(losses, list) else [losses])]
        engine.before_step(models)
        record.losses.append(_mean_over_ranks(losses, engine.world))
        if not case.skip_grads:
            record.grads.append(_gradient_norms(models))
        if case.clip is not None:
            everything = [p for _, p in _named(models)]
            record.norms.append(float(nn.utils.clip_grad_norm_(everything, case.clip)))
        env.optimizer.step()
        env.optimizer.zero_grad(set_to_none=case.set_to_none)
        record.states.append(_full_state(engine, models))
    return record


# -- comparing ---------------------------------------------------------------------------------------------------------


def _far(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str | None:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype}{list(got.shape)} instead of {expected.dtype}{list(expected.shape)}"
    if tolerance == 0 and torch.equal(got, expected):
        return None
    if not got.numel():
        return None
    a, b = got.double(), expected.double()
    error = (a - b).abs().max().item()
    scale = max(1.0, b.abs().max().item())
    if error <= tolerance * scale:
        return None if tolerance else f"bits differ, largest difference {error:.3g}"
    return f"off by {error:.3g} at scale {scale:.3g}"


def _differences(got: Record, expected: Record, k: int, tolerance: float) -> list[str]:
    wrong: list[str] = []

    def check(what: str, a: Any, b: Any) -> None:
        if (a is None) != (b is None):
            wrong.append(f"{what}: {'none' if a is None else a} instead of {'none' if b is None else b}")
        elif a is not None:
            far = _far(torch.as_tensor(a), torch.as_tensor(b), tolerance)
            if far:
                wrong.append(f"{what}: {far}")

    for i, (a, b) in enumerate(zip(got.losses[k], expected.losses[k], strict=True)):
        check(f"loss {i}", a, b)
    if expected.grads:
        assert got.grads[k].keys() == expected.grads[k].keys()
        for name, value in expected.grads[k].items():
            check(f"norm of the gradient of {name}", got.grads[k][name], value)
    if expected.norms:
        check("global norm", got.norms[k], expected.norms[k])
    odd = sorted(got.states[k].keys() ^ expected.states[k].keys())
    assert not odd, f"names differ: {odd}"
    for name, value in expected.states[k].items():
        check(name, got.states[k][name], value)
    return wrong


def compare(got: Record, expected: Record, tolerance: float) -> None:
    """Raise AssertionError that lists, for the first step that differs, what does."""
    for k in range(len(expected.states)):
        wrong = _differences(got, expected, k, tolerance)
        more = f"; and {len(wrong) - 12} more" if len(wrong) > 12 else ""
        assert not wrong, f"step {k}: " + "; ".join(wrong[:12]) + more


_references: dict[str, Record] = {}  # by case name: a process computes each once for all stages


def reference(name: str, case: Case) -> Record:
    if name not in _references:
        _references[name] = train(case, Alone())
    return _references[name]


def parity(name: str, case: Case, engine: Alone) -> None:
    """Train under `engine` and compare with one plain process on the whole batch; bit for bit if it is one too."""
    tolerance = 0.0 if engine.world == 1 and case.bits else case.tolerance
    compare(train(case, engine), reference(name, case), tolerance)
