"""The engine's public face."""

from __future__ import annotations

import atexit
import fnmatch
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardproof.zero.optim.step  # noqa: F401  (registers the step hooks)
from shardproof.errors import EngineError, NonFiniteError
from shardproof.zero import state
from shardproof.zero.build import Builder, UnitChoice
from shardproof.zero.checks import (
    check_and_move,
    check_codes,
    check_forwards,
    check_memory,
    check_steps,
    check_unwrapped,
    engine_of,
    has_engine,
    warn_of_statistics,
)
from shardproof.zero.comm.collectives import Collectives
from shardproof.zero.comm.world import start_group
from shardproof.zero.device import default_device, imagined
from shardproof.zero.precision import MixedPrecision
from shardproof.zero.ranks.consensus import BARRIER
from shardproof.zero.ranks.invariants import some
from shardproof.zero.schedule.engine import Engine
from shardproof.zero.schedule.home import home_of
from shardproof.zero.stats import Stats, UnitStats
from shardproof.zero.tensors.norms import GradientGroup, learning_parameters, norms_of
from shardproof.zero.tensors.parameter import ShardedGradient

__all__ = [
    "MixedPrecision",
    "Stats",
    "UnitStats",
    "barrier",
    "clip_grad_norm_",
    "full_state_dict",
    "load_full_state_dict",
    "no_sync",
    "shard",
    "stats",
    "whole",
]

Model = TypeVar("Model", bound=nn.Module)


def shard(
    model: Model,
    stage: int,
    *,
    units: UnitChoice = None,
    mixed_precision: MixedPrecision | torch.dtype | None = None,
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    offload: str | None = None,
    dynamic: str | Sequence[str] = "auto",
    desync_timeout: float = 10.0,
    keep_gathered: int = 0,
    inference_memory: int | None = None,
    deterministic: bool = False,
    gradient_divide_factor: float | None = None,
) -> Model:
    """Shard `model` in place over the ranks of the process group.

    The model stays the same object of the same class with the same names. Its parameters become whole to
    the user's code and a slice in memory: a plain training loop gives the numbers of one process at every
    stage. Gradients are averaged over ranks. All ranks start from the values of rank 0.

    Args:
        model: any module that holds its values (not on the meta device). Of a parameter with an attribute `read_range`,
            a function of the first and the last (exclusive) element, each rank reads what it keeps, 1-D, and what the
            parameter itself holds does not matter. `shardproof.load_pretrained` loads models so.
        stage: 0 replicates everything; 1 shards optimizer state; 2 gradients too; 3 parameters too.
        units: module classes, class names or name patterns (`layers.*`) that are gathered together. Default: the
            repeated blocks of the model; what lies outside of them is the root unit.
        mixed_precision: compute and reduce dtype; a bare dtype means computing in it and reducing in float32.
        mesh: the device mesh of the ranks that share the model. Default: all ranks, in one dimension. With two
            (replicate, shard) each row holds a copy: parameters are gathered within a row, and what was reduced there
            is all that crosses between rows (hybrid sharding).
        dynamic: what happens where ranks use different units. "auto" adapts when ranks are first seen to differ and
            says so; a list of unit names or patterns declares them, "all" declares every unit; "never" raises.
        desync_timeout: seconds within which ranks that wait for each other for good (one sits in a barrier, the
            others in a step) end with a message. A rank that is merely slow is never ended.
        keep_gathered: bytes that whole parameters may take on each rank at stage 3 from one use to the next, beyond the
            units in use: those that backward needs first, and what is frozen or not yet updated, are not gathered
            again. Default: none.
        inference_memory: bytes that whole parameters may take on each rank at stage 3 while one inference pass follows
            the other (a generation). Default: half of the memory that is free then; 0 gathers unit by unit.
        deterministic: add gradients in one order, so that any number of ranks gives the same bits, given the same
            micro-batches dealt out in turn (number j * ranks + r to rank r) and losses that do not depend on the number
            of ranks. Costs a reduction for each backward pass, at whose end ranks wait for each other, and whole
            gradients during it; `no_sync` has no effect.
        gradient_divide_factor: divide sums of gradients over ranks by this. Default: the number of ranks. A division
            by anything but a power of two rounds; with 1, and a loss divided by what all ranks have, nothing does.
        device: where to compute. Default: the accelerator of the rank, else the CPU.
        offload: what lives elsewhere than on `device`: "optimizer" keeps masters, gradients and optimizer state of what
            is trained in the host's memory, "all" every shard, "nvme:FOLDER" every shard in files of a folder. The
            numbers stay those of a run without. On the CPU the first two change nothing.

    Returns: `model`.

    Raises:
        EngineError: stage outside 0 to 3, a model that is sharded already or has no values, a mesh that does not
            fit the process group, an offload that does not exist or a folder that cannot be used.

    Works without a launcher (world size 1). Where one has set torch's variables (RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT), it makes the default process group unless there is one.
    """
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise EngineError(
            f"stage={stage!r} does not exist. Stage 0 replicates, 1 shards optimizer state, 2 gradients too, "
            "3 parameters too."
        )
    if not isinstance(model, nn.Module):
        raise EngineError(f"shard takes a torch.nn.Module, not a {type(model).__name__}.")
    if torch.is_inference_mode_enabled():
        raise EngineError("Call shardproof.shard outside of torch.inference_mode: what is made inside cannot train.")
    if has_engine(model):
        raise EngineError(f"This {type(model).__name__} is sharded already. Call shardproof.shard once per model.")
    check_unwrapped(model)
    check_steps(model)
    if isinstance(dynamic, str) and dynamic not in ("auto", "all", "never"):
        raise EngineError(f"dynamic={dynamic!r} is not one of 'auto', 'all', 'never', or a list of unit names.")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise EngineError(f"mesh={mesh!r} is not a DeviceMesh. Make one with torch.distributed.init_device_mesh.")
    if not isinstance(desync_timeout, (int, float)) or desync_timeout <= 0:
        raise EngineError(f"desync_timeout={desync_timeout!r} must be a number of seconds above 0.")
    if not isinstance(keep_gathered, int) or keep_gathered < 0:
        raise EngineError(f"keep_gathered={keep_gathered!r} must be a number of bytes, 0 or more.")
    if gradient_divide_factor is not None and not gradient_divide_factor > 0:
        raise EngineError(f"gradient_divide_factor={gradient_divide_factor!r} must be a number above 0.")
    if deterministic and mesh is not None and mesh.ndim > 1:
        raise EngineError("deterministic=True needs a mesh of one dimension: replicas add their sums in another order.")
    declared = ("*",) if dynamic == "all" else () if isinstance(dynamic, str) else tuple(dynamic)
    names = ["root", *(name for name, _ in model.named_modules())]
    for pattern in declared:
        if not fnmatch.filter(names, f"{pattern}*"):
            raise EngineError(f"dynamic={list(declared)!r}: no module of the model is named {pattern!r}.")
    target = default_device() if device is None else _device(device)
    if isinstance(mixed_precision, torch.dtype):
        mixed_precision = MixedPrecision(mixed_precision)
    _check_precision(mixed_precision)
    home = home_of(offload, target)
    check_memory(model)
    check_codes(model, mixed_precision)
    check_and_move(model, target)
    comm = Collectives(_group(mesh, target), target, *_rows_and_columns(mesh))
    check_forwards(model, comm.size)
    warn_of_statistics(model, mixed_precision)
    engine = Engine(model, int(stage), comm, mixed_precision, home)
    engine.declared, engine.deterministic = declared, deterministic
    engine.divisor = float(gradient_divide_factor or comm.size)
    engine.keep_gathered, engine.inference_memory = keep_gathered, inference_memory
    engine.adaptive = dynamic != "never"
    if engine.streams.watchdog is not None:
        engine.streams.watchdog.patience = desync_timeout
    engine.builder = Builder(engine, units)
    engine.builder.build()
    model.__dict__["_shardproof"] = engine
    return model


def _device(device: torch.device | str) -> torch.device:
    here = torch.accelerator.current_accelerator(check_available=True)
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError):
        target = torch.device("meta")
    if target.type == "meta" and imagined(None):
        return target
    if target == torch.device("cpu", 0):
        return torch.device("cpu")  # tensors are on "cpu", and code that asks where they are compares
    if target.type != "cpu" and (here is None or here.type != target.type):
        raise EngineError(
            f"device={str(device)!r} is not available. There is cpu{f' and {here.type}' if here else ''}."
        )
    if target.type != "cpu" and target.index is None:
        return default_device()
    return target


def _check_precision(precision: Any) -> None:
    fits = precision is None or (
        isinstance(precision, MixedPrecision)
        and all(isinstance(d, torch.dtype) and d.is_floating_point for d in (precision.compute, precision.reduce))
    )
    if not fits:
        raise EngineError(
            f"mixed_precision={precision!r} is not a floating-point dtype. Pass torch.bfloat16, or "
            "shardproof.MixedPrecision(compute=torch.bfloat16, reduce=torch.float32)."
        )


def _group(mesh: DeviceMesh | None, device: torch.device) -> dist.ProcessGroup | None:
    if mesh is not None:
        if mesh.ndim > 2:
            raise EngineError(
                f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names or tuple(mesh.shape)}; pass the one to shard "
                "over, for example mesh['data'], or the two to replicate and to shard over."
            )
        if mesh.get_coordinate() is None:
            raise EngineError(
                f"Rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}: the process group has "
                f"{dist.get_world_size()} ranks and the mesh {mesh.size()}. Every rank that calls shard must be in it."
            )
        if mesh.ndim == 2:
            return _both_dimensions(mesh)
        return mesh.get_group()
    if not dist.is_initialized() and _launched():
        start_group(backend=dist.get_default_backend_for_device(device))
        atexit.register(_leave_group)
    return None


def _both_dimensions(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """All ranks of a two-dimensional mesh, in one group; None for the default one."""
    if mesh.size() == dist.get_world_size():
        return None
    if not mesh.mesh_dim_names:
        raise EngineError(
            f"The mesh {mesh.mesh.tolist()} has only some of the ranks, and its dimensions have no names, which "
            "torch needs to make a group of it: pass mesh_dim_names=('replicate', 'shard')."
        )
    return mesh._flatten().get_group()


def _rows_and_columns(mesh: DeviceMesh | None) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Of a two-dimensional mesh: the ranks that hold one copy with this one, and those that hold the same part."""
    if mesh is None or mesh.ndim == 1:
        return None, None
    return mesh.get_group(1), mesh.get_group(0)


def _launched() -> bool:
    """Whether a launcher has started this process as one of several: torchrun, srun, mpirun with torch's variables."""
    told = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    if len(told) < 4 and os.environ.get("WORLD_SIZE", "1") != "1":  # each rank would train alone, without a word
        missing = sorted({"RANK", "MASTER_ADDR", "MASTER_PORT"} - set(told))
        raise EngineError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} says there are other ranks, but {', '.join(missing)} is not set."
            " Start with torchrun, set the missing variables, or call torch.distributed.init_process_group before."
        )
    return len(told) == 4


def _leave_group() -> None:
    """Who makes a process group also ends it: a thread of gloo that lets go of a tensor while the interpreter
    shuts down aborts the process. NCCL waits for what is queued, which a rank that is lost never joins: after an error
    it is left to abort."""
    failed = getattr(sys, "last_value", None) is not None
    if dist.is_initialized() and not (failed and torch.accelerator.is_available()):
        dist.destroy_process_group()


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients on this rank: backward passes inside reduce nothing. The first backward pass
    outside reduces the sum. Looking at a gradient inside reduces what there is by then."""
    engine = engine_of(model)
    engine.gradients.sync_depth += 1
    try:
        yield
    finally:
        engine.gradients.sync_depth -= 1


def barrier(model: nn.Module) -> None:
    """Wait until every rank is here, and meanwhile lend this rank's shards to those who still compute.

    A collective of one's own (`torch.distributed.all_gather` of what was generated) blocks a rank that others may still
    need, at stages 1 to 3: where ranks differ in what they compute, call this first. Call it on all ranks. Behind it
    ranks that do the same need the same of each other.
    """
    engine = engine_of(model)
    engine.meet(BARRIER)
    engine.streams.level()


@contextmanager
def whole(model: nn.Module, *, writeback: bool = False) -> Iterator[nn.Module]:
    """Inside, every parameter is an ordinary whole `nn.Parameter` (surgery, export, inference loops).

    Call it on all ranks. The whole model must fit in memory. With `writeback=True` edits are kept: in place, of
    `.data`, a parameter or a module replaced by another one, also of another shape. Make the edit on all ranks.

    Raises:
        EngineError: on leaving, if a parameter was edited and `writeback` is False (the edit is dropped), or
            if a backward pass inside left gradients; names the parameters.
    """
    engine = engine_of(model)
    stand_ins = state.enter_whole(engine)
    try:
        yield model
    except BaseException:
        state.leave_whole(engine, stand_ins, keep=False)
        raise
    edited, replaced, with_gradient = state.leave_whole(engine, stand_ins, keep=writeback)
    if with_gradient:
        raise EngineError(
            f"A backward pass inside shardproof.whole() left a gradient on {some(with_gradient)}; it is lost. "
            "Train outside of it."
        )
    if (edited or replaced) and not writeback:
        raise EngineError(
            f"{some(edited + replaced)} was edited inside shardproof.whole(model), and the edit is dropped. "
            "Use shardproof.whole(model, writeback=True) to keep it."
        )


def full_state_dict(model: nn.Module, rank0_only: bool = True) -> dict[str, Any]:
    """Whole CPU tensors under the model's own names, in master dtype, one unit in memory at a time.

    Call it on all ranks. Tied parameters appear under each of their names as one tensor.

    Returns: the state dict; an empty one on other ranks than 0 if `rank0_only`.
    """
    return state.full_state_dict(engine_of(model), rank0_only)


def load_full_state_dict(model: nn.Module, state_dict: dict[str, Any], *, strict: bool = True) -> None:
    """Load whole tensors, one unit in memory at a time. Call it on all ranks; the dict of rank 0 counts, others may
    pass an empty one.

    Raises:
        EngineError: on all ranks, if names (when `strict`) or shapes do not fit; names the first five.
    """
    state.load_full_state_dict(engine_of(model), state_dict, strict)


def clip_grad_norm_(
    model: nn.Module | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their global norm is at most `max_norm`; as `torch.nn.utils.clip_grad_norm_`, which
    works too, but with an error that names the parameters.

    Returns: the norm before clipping, a scalar tensor.

    Raises:
        NonFiniteError: if asked to check and the norm is inf or nan; nothing is scaled then.
    """
    params = learning_parameters(model) if isinstance(model, nn.Module) else list(model)
    if norm_type >= 0 and (group := GradientGroup.of(params)) is not None:
        total = group.norm(norm_type)
        if not error_if_nonfinite or bool(torch.isfinite(total)):
            group.scale(max_norm, total)
            return total
    grads = [g for p in params if (g := p.grad) is not None]
    if not grads:
        return torch.zeros(())
    total = torch.nn.utils.get_total_norm(grads, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        sharded = [g for g in grads if isinstance(g, ShardedGradient)]
        norms = norms_of(sharded, norm_type)
        bad = [g.qualified_name for g, ok in zip(sharded, norms.isfinite().tolist(), strict=True) if not ok]
        raise NonFiniteError(
            f"The gradient norm is {float(total)}; not finite: {some(bad) or 'their sum'}. Lower the learning rate, "
            "look for a division by zero in the loss, or skip this step."
        )
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, total)
    return total


def stats(model: nn.Module) -> Stats:
    """Bytes held, bytes moved and events, per unit and in total, of this rank."""
    engine = engine_of(model)
    units = {u.name: UnitStats(u.shard_bytes, u.gathered_bytes, **vars(u.counters)) for u in engine.units}
    fields = UnitStats.__dataclass_fields__
    total = {name: sum(getattr(u, name) for u in units.values()) for name in fields}
    total["gathered_peak_bytes"] = engine.peak_bytes
    streams = engine.streams
    voted = streams.words, streams.seconds, streams.rounds_apart, streams.paid
    return Stats(UnitStats(**total), units, *voted, engine.exposed.seconds())
