"""How the trainers shard their models: each in place, at a stage and in a precision, and marked as prepared."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardproof
from shardproof.errors import ConfigError
from shardproof.integrations.pretrained import lend_readers
from shardproof.models.families.anatomy import anatomy
from shardproof.zero.build import READER
from shardproof.zero.checks import has_engine
from shardproof.zero.comm.world import may_take_long

if TYPE_CHECKING:
    from shardproof import MixedPrecision

_WANTED = "_shardproof_as"


def shard_as(
    model: nn.Module,
    stage: int | None = None,
    mixed_precision: MixedPrecision | None = None,
    offload: str | None = None,
) -> nn.Module:
    """Make the trainer that gets this model shard it at its own stage, in its own precision and with its own `offload`
    (as for `shardproof.shard`; "none": on the device).

        judge = shard_as(judge, stage=1, mixed_precision=MixedPrecision(compute=torch.bfloat16))
        sharded(GRPOTrainer)(model=model, reward_funcs=[judge], ..., stage=3)

    None leaves a setting to the trainer. Nothing is sharded yet. Returns the model.
    """
    model.__dict__[_WANTED] = stage, mixed_precision, offload
    return model


def as_wanted(model: nn.Module, stage: int, precision: MixedPrecision | None) -> tuple[int, MixedPrecision | None]:
    """The settings that `shard_as` made for the model, or else these."""
    wanted = model.__dict__.get(_WANTED, (None, None, None))
    return stage if wanted[0] is None else wanted[0], wanted[1] or precision


def hybrid_mesh(shard_group: int | None, device: torch.device) -> DeviceMesh | None:
    """A mesh with groups of `shard_group` ranks, each of which holds a copy; None if all ranks hold one copy.

    Raises:
        ConfigError: the number of ranks is not a multiple of it.
    """
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if shard_group is None or shard_group == ranks:
        return None
    if ranks % shard_group:
        raise ConfigError(f"{ranks} ranks cannot be divided into groups of {shard_group} ranks with one copy each.")
    names = ("replicate", "shard")
    mesh = init_device_mesh(device.type, (ranks // shard_group, shard_group), mesh_dim_names=names)
    may_take_long(*mesh.get_all_groups())
    return mesh


def hold_as_computed(model: nn.Module, precision: MixedPrecision | None, saved: Collection[str] = ()) -> bool:
    """Before a model is sharded: keep frozen parameters in the compute dtype.

    They are rounded to that dtype in any case when gathered, so results do not change, and their memory is halved.

    Args:
        saved: the names of weights that will be saved, which are converted only if that loses nothing. The base of
            adapters, or a model that is never trained, is not saved.

    Returns: whether anything was changed.
    """
    if precision is None:
        return False
    hold_buffers(model, precision.compute)
    compute, found = precision.compute, False
    kept = {id(value) for name, value in model.state_dict(keep_vars=True).items() if name in saved} if saved else set()
    for p in model.parameters():
        if type(p) is nn.Parameter and not p.requires_grad and p.is_floating_point() and p.itemsize > compute.itemsize:
            waits = READER in p.__dict__  # its values have not been read, and take no memory yet
            value = p.new_empty((), dtype=compute).expand(p.shape) if waits else p.data.to(compute)
            if id(p) not in kept or _fits(p, value):
                p.data, found = value, True
    return found


def hold_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep the buffers of adapters (VeRA's random matrices) in the compute dtype, in which the parameters that they are
    combined with are gathered."""
    if not getattr(model, "peft_config", None):
        return
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer

    for outer in model.modules():
        if isinstance(outer, (BaseTuner, BaseTunerLayer)):
            inner = "model." if isinstance(outer, BaseTuner) else "base_layer."
            for name, value in outer.named_buffers():
                if not name.startswith(inner) and value.is_floating_point():
                    value.data = value.data.to(dtype)


def _fits(p: nn.Parameter, value: torch.Tensor) -> bool:
    """Whether a parameter loses nothing in the dtype of `value`, its converted values unless they have not been read
    yet."""
    if READER not in p.__dict__:
        return torch.equal(value.to(p.dtype), p.data)
    stored = getattr(p.__dict__[READER], "dtype", None)
    return stored is not None and torch.promote_types(stored, value.dtype) == value.dtype


def shard_prepared(
    model: nn.Module,
    stage: int,
    precision: MixedPrecision | None,
    device: torch.device | None,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> nn.Module:
    """Shard a model as its family requires, and mark it so that accelerate neither wraps nor moves it.

    Settings from `shard_as` take precedence. A model that is already sharded is left unchanged.
    """
    stage, precision = as_wanted(model, stage, precision)
    if offload := model.__dict__.get(_WANTED, (None, None, None))[2]:
        options["offload"] = None if offload == "none" else offload
    model._is_accelerate_prepared = True  # type: ignore[assignment]  # a flag beside modules and parameters
    if has_engine(model):
        return model
    lend_readers(model)
    known = anatomy(model)
    shardproof.shard(
        model,
        stage,
        units=known.units,
        dynamic=known.dynamic or "auto",
        mixed_precision=precision,
        device=device,
        mesh=mesh,
        **options,
    )
    return model


def compile_units(model: nn.Module, **options: Any) -> int:
    """Compile the blocks of a sharded model in place, each separately. Gathering stays outside the compiled code.

    Code outside the blocks (embedding, head, loss) runs uncompiled. `options` are those of `torch.compile`.

    Returns: the number of blocks.

    Raises:
        ConfigError: the model has no blocks.
    """
    engine = model.__dict__["_shardproof"]
    blocks = [module for unit in engine.units if not unit.is_root for module in unit.entries]
    if not blocks:
        raise ConfigError(
            f"{type(model).__name__} has no repeated blocks to compile: leave out --compile or torch_compile=True."
        )
    for block in blocks:
        block.compile(**options)
    return len(blocks)


def adds_up_whole(model: nn.Module) -> bool:
    """Whether unsharded gradients stay on the computing device between micro-batches anyway: at stages 0 and 1, and if
    there is nobody to share them with. Then they are reduced once per step."""
    engine = model.__dict__["_shardproof"]
    return bool(engine.stage < 2 or (engine.comm.shards == 1 and engine.home is None))


@contextlib.contextmanager
def together(model: nn.Module) -> Iterator[None]:
    """On leaving, wait until every rank has come to the end: ranks generate answers of different lengths, and a rank
    that waits in one of the trainer's collectives lends its slices to nobody."""
    yield
    if is_sharded(model):
        shardproof.barrier(model)


def meeting_first(loader: Any, meet: Callable[[], None]) -> Any:
    """Make an Accelerate loader call `meet` before it communicates with all ranks, since a rank that waits there lends
    its slices to nobody. It communicates at the beginning, if it shuffles, and for each batch that rank 0 reads and
    distributes. Changed in place, since the accelerator holds the loader, too."""
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard

    kind: Any = type(loader)
    if not isinstance(loader, DataLoaderDispatcher | DataLoaderShard) or hasattr(kind, "meets"):
        return loader
    always = isinstance(loader, DataLoaderDispatcher)

    def batches(self: Any) -> Iterator[Any]:
        if not always and self.rng_types:
            meet()
        found = kind.__iter__(self)
        while True:
            if always:
                meet()
            try:
                batch = next(found)
            except StopIteration:
                return
            yield batch

    changed = type(kind.__name__, (kind,), {"__iter__": batches, "meets": True})
    object.__dict__["__class__"].__set__(loader, changed)  # the loader's own `__class__` is its inner loader's
    return loader


def meeting_before(accelerator: Any, meet: Callable[[], None]) -> None:
    """Make a trainer's accelerator call `meet` before it communicates with all ranks: a rank that waits in a collective
    lends its slices to nobody, and a callback of another rank may need them. Methods are replaced on this accelerator
    only."""
    prepare, gather = accelerator.prepare_data_loader, accelerator.gather_for_metrics

    def met(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        meet()
        return collective(*args, **kwargs)

    accelerator.prepare_data_loader = lambda *args, **kwargs: meeting_first(prepare(*args, **kwargs), meet)
    for name in ("gather", "reduce", "pad_across_processes", "wait_for_everyone"):
        setattr(accelerator, name, functools.partial(met, getattr(accelerator, name)))
    accelerator.gather_for_metrics = lambda rows, *args, **kwargs: gather(filled_up(accelerator, rows), *args, **kwargs)


def filled_up(accelerator: Any, rows: Any) -> Any:
    """Pad the rows for `gather_for_metrics` if the loader distributes unevenly (`even_batches=False`): in the last
    round the last process has fewer rows than the others, and a gather needs equal numbers. The padding is cut off
    afterwards.

    Raises:
        ConfigError: some processes have no batch in that round, and would not take part in the gather.
    """
    from accelerate.data_loader import BatchSamplerShard

    state, ranks = accelerator.gradient_state, accelerator.num_processes
    sampler = getattr(state.active_dataloader, "batch_sampler", None)
    while sampler is not None and not isinstance(sampler, BatchSamplerShard):
        sampler = getattr(sampler, "batch_sampler", None)  # for a loader that skips its first batches
    if sampler is None or sampler.even_batches or ranks == 1 or state.remainder <= 0:
        return rows
    if state.remainder <= state.active_dataloader.total_batch_size // ranks * (ranks - 1):
        raise ConfigError(
            f"gather_for_metrics waits for all {ranks} processes, and with even_batches=False some of them have no "
            f"batch in the last round of this loader, which has {state.remainder} rows left.\n"
            "Keep even_batches=True: rows that pad the last batches are removed from the result."
        )
    with contextlib.suppress(TypeError):  # objects, whose number may differ between processes
        return accelerator.pad_across_processes(rows) if state.end_of_dataloader else rows
    return rows


def is_sharded(model: nn.Module) -> bool:
    return getattr(model, "_is_accelerate_prepared", False) is True


def check_processes(accelerator: Any) -> None:
    """Refuse an accelerator that considers this process the only one although a model is sharded: every rank would
    train on all rows. Accelerate reads a launcher's variables; on a machine without a GPU, only if it is told to use
    the CPU."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if (seen := accelerator.num_processes) != ranks:
        raise ConfigError(
            f"Accelerate sees {seen} process{'es' * (seen != 1)}, but {ranks} processes share the model: each would "
            "train on the rows of the others.\n"
            "Start with torchrun or `accelerate launch`, and without a GPU pass TrainingArguments(use_cpu=True) or "
            "Accelerator(cpu=True)."
        )


def noted(accelerator: Any, model: nn.Module) -> nn.Module:
    """Replaces `prepare_model` for a model that it must not prepare: accelerate before 1.14 wraps it in spite of its
    mark."""
    check_processes(accelerator)
    if model not in accelerator._models:
        accelerator._models.append(model)
    return model


def refuse_others(**asked: Any) -> None:
    """Refuse other engines that would shard a trainer's model; `asked`: whether they are enabled, by name."""
    other = next((name for name, given in asked.items() if given), None)
    if other is not None:
        raise ConfigError(
            f"The trainer's arguments or the launcher enable {other}, but shardproof shards the model.\n"
            f"Leave {other} out of the arguments and of the launcher's configuration."
        )


def stepping(optimizer: Any) -> Any:
    """Return this optimizer if it steps in `step` only. LOMO's hooks look at the gradients of other parameters while
    backward computes them; here those are not reduced over ranks yet.

    Raises:
        ConfigError: it does not.
    """
    if hasattr(getattr(optimizer, "optimizer", optimizer), "fused_backward"):
        raise ConfigError(
            f"{type(optimizer).__name__} changes weights inside backward, before gradients are reduced over processes."
            "\nUse another optimizer. At stages 2 and 3 each process holds a slice of the gradients; 'adafactor' has "
            "little state."
        )
    return optimizer


def check_full_eval(args: Any, precision: MixedPrecision | None) -> None:
    """Refuse a precision for Trainer's evaluations that differs from the training precision."""
    half = {"fp16_full_eval": torch.float16, "bf16_full_eval": torch.bfloat16}
    for name, dtype in half.items():
        if getattr(args, name) and (precision is None or precision.compute != dtype):
            raise ConfigError(
                f"{name}=True casts the weights, but each rank holds a slice of them in the training precision. Train "
                f"in that precision, too ({name[:4]}=True), or leave it out."
            )
