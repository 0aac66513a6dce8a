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
    """Have the trainer that this model is given to shard it at a stage and in a precision of its own, and keep it
    elsewhere than others (`offload`, as for `shardproof.shard`; "none": on the device).

        judge = shard_as(judge, stage=1, mixed_precision=MixedPrecision(compute=torch.bfloat16))
        sharded(GRPOTrainer)(model=model, reward_funcs=[judge], ..., stage=3)

    None leaves it to the trainer. Nothing is sharded yet. Returns the model.
    """
    model.__dict__[_WANTED] = stage, mixed_precision, offload
    return model


def as_wanted(model: nn.Module, stage: int, precision: MixedPrecision | None) -> tuple[int, MixedPrecision | None]:
    """What `shard_as` said of the model, or else this."""
    wanted = model.__dict__.get(_WANTED, (None, None, None))
    return stage if wanted[0] is None else wanted[0], wanted[1] or precision


def hybrid_mesh(shard_group: int | None, device: torch.device) -> DeviceMesh | None:
    """Rows of `shard_group` ranks, each of which holds a copy; None where all ranks hold one.

    Raises:
        ConfigError: the number of ranks is no multiple of it.
    """
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if shard_group is None or shard_group == ranks:
        return None
    if ranks % shard_group:
        raise ConfigError(f"Groups of {shard_group} ranks that hold a copy each cannot be made of {ranks} ranks.")
    names = ("replicate", "shard")
    mesh = init_device_mesh(device.type, (ranks // shard_group, shard_group), mesh_dim_names=names)
    may_take_long(*mesh.get_all_groups())
    return mesh


def hold_as_computed(model: nn.Module, precision: MixedPrecision | None, saved: Collection[str] = ()) -> bool:
    """Before a model is sharded: keep what is not trained in the dtype that it is computed with.

    It is rounded to that dtype in any case, whenever it is gathered, so no number changes, and half of its memory is
    left.

    Args:
        saved: the names of weights that somebody saves, which are kept so only where they have no more digits than
            that. Nobody saves the base of adapters, and a model that is only asked.

    Returns: whether there was anything to do.
    """
    if precision is None:
        return False
    hold_buffers(model, precision.compute)
    compute, found = precision.compute, False
    kept = {id(value) for name, value in model.state_dict(keep_vars=True).items() if name in saved} if saved else set()
    for p in model.parameters():
        if type(p) is nn.Parameter and not p.requires_grad and p.is_floating_point() and p.itemsize > compute.itemsize:
            waits = READER in p.__dict__  # for its values, and takes no memory until then
            value = p.new_empty((), dtype=compute).expand(p.shape) if waits else p.data.to(compute)
            if id(p) not in kept or _fits(p, value):
                p.data, found = value, True
    return found


def hold_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep the buffers of adapters (VeRA's matrices by chance) in the dtype that they are computed with: they meet
    parameters that are gathered in it."""
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
    """Whether a parameter loses nothing in the dtype of `value`, which it has in that dtype unless it waits for it."""
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
    """Shard by what is known of the model's family, and mark it so that accelerate neither wraps nor moves it.

    What `shard_as` said of the model comes first. A model that is sharded already stays as it is.
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
    """Compile the blocks of a sharded model, each by itself, in place. Gathering stays outside of what is compiled.

    What lies outside of blocks (embedding, head, loss) runs as it is. `options` are those of `torch.compile`.

    Returns: how many blocks there are.

    Raises:
        ConfigError: the model has no blocks.
    """
    engine = model.__dict__["_shardproof"]
    blocks = [module for unit in engine.units if not unit.is_root for module in unit.entries]
    if not blocks:
        raise ConfigError(
            f"{type(model).__name__} has no repeated blocks to compile: leave --compile, or torch_compile=True, out."
        )
    for block in blocks:
        block.compile(**options)
    return len(blocks)


def adds_up_whole(model: nn.Module) -> bool:
    """Whether whole gradients stay where the model computes between micro-batches anyway: at stages 0 and 1, and where
    nobody shares them. Then they are reduced once a step."""
    engine = model.__dict__["_shardproof"]
    return bool(engine.stage < 2 or (engine.comm.shards == 1 and engine.home is None))


@contextlib.contextmanager
def together(model: nn.Module) -> Iterator[None]:
    """Leave only when every rank has come to the end of this: ranks write answers of different lengths, and one that
    waits in a collective of the trainer's lends its slices to nobody."""
    yield
    if is_sharded(model):
        shardproof.barrier(model)


def meeting_first(loader: Any, meet: Callable[[], None]) -> Any:
    """Have a loader of Accelerate's call `meet` before it talks to all ranks, for one that waits there lends its slices
    to nobody. It does when it begins, if it shuffles, and for each batch that rank 0 reads and deals out. Changed in
    place: the accelerator holds it, too."""
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
    object.__dict__["__class__"].__set__(loader, changed)  # the loader's own `__class__` is that of the one inside
    return loader


def meeting_before(accelerator: Any, meet: Callable[[], None]) -> None:
    """Have a trainer's accelerator call `meet` before it talks to all ranks: one that gathers lends its slices to
    nobody, and a callback of another may be at work. Methods are replaced on this accelerator."""
    prepare, gather = accelerator.prepare_data_loader, accelerator.gather_for_metrics

    def met(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        meet()
        return collective(*args, **kwargs)

    accelerator.prepare_data_loader = lambda *args, **kwargs: meeting_first(prepare(*args, **kwargs), meet)
    for name in ("gather", "reduce", "pad_across_processes", "wait_for_everyone"):
        setattr(accelerator, name, functools.partial(met, getattr(accelerator, name)))
    accelerator.gather_for_metrics = lambda rows, *args, **kwargs: gather(filled_up(accelerator, rows), *args, **kwargs)


def filled_up(accelerator: Any, rows: Any) -> Any:
    """What `gather_for_metrics` may gather of a loader that deals out unevenly (`even_batches=False`): in the last
    round the last process has fewer rows than others, and a gather wants as many of all. What fills up is cut off.

    Raises:
        ConfigError: some processes have no batch in that round, and would not come to gather.
    """
    from accelerate.data_loader import BatchSamplerShard

    state, ranks = accelerator.gradient_state, accelerator.num_processes
    sampler = getattr(state.active_dataloader, "batch_sampler", None)
    while sampler is not None and not isinstance(sampler, BatchSamplerShard):
        sampler = getattr(sampler, "batch_sampler", None)  # of a loader that skips its first batches
    if sampler is None or sampler.even_batches or ranks == 1 or state.remainder <= 0:
        return rows
    if state.remainder <= state.active_dataloader.total_batch_size // ranks * (ranks - 1):
        raise ConfigError(
            f"gather_for_metrics waits for all {ranks} processes, and with even_batches=False some of them have no "
            f"batch in the last round of this loader, which has {state.remainder} rows left.\n"
            "Keep even_batches=True: what fills up the last batches is cut off before it is returned."
        )
    with contextlib.suppress(TypeError):  # objects, of which each process may have as many as it likes
        return accelerator.pad_across_processes(rows) if state.end_of_dataloader else rows
    return rows


def is_sharded(model: nn.Module) -> bool:
    return getattr(model, "_is_accelerate_prepared", False) is True


def check_processes(accelerator: Any) -> None:
    """Refuse an accelerator that takes this process for the only one, once a model is sharded: every rank would train
    on all rows. Accelerate reads a launcher's variables, and without an accelerator only if it is told of the CPU."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if (seen := accelerator.num_processes) != ranks:
        raise ConfigError(
            f"Accelerate sees {seen} process{'es' * (seen != 1)}, and {ranks} hold the model between them: each would "
            "train on the rows of others.\n"
            "Start with torchrun or `accelerate launch`, and without a GPU say so: TrainingArguments(use_cpu=True), or "
            "Accelerator(cpu=True)."
        )


def noted(accelerator: Any, model: nn.Module) -> nn.Module:
    """What `prepare_model` does with a model that it is not to prepare: before 1.14 accelerate wraps it, whatever its
    mark says."""
    check_processes(accelerator)
    if model not in accelerator._models:
        accelerator._models.append(model)
    return model


def refuse_others(**asked: Any) -> None:
    """Refuse what else would shard the model of a trainer, by its name: whether it is asked for."""
    other = next((name for name, given in asked.items() if given), None)
    if other is not None:
        raise ConfigError(
            f"The trainer's arguments, or the launcher's, ask for {other}; shardproof shards the model here.\n"
            f"Leave {other} out of the arguments and of the launcher's configuration."
        )


def stepping(optimizer: Any) -> Any:
    """This optimizer, if it steps when it is told to. LOMO's hooks look at the gradients of other parameters while
    backward computes them; here those are not added over ranks yet.

    Raises:
        ConfigError: it does not.
    """
    if hasattr(getattr(optimizer, "optimizer", optimizer), "fused_backward"):
        raise ConfigError(
            f"{type(optimizer).__name__} changes weights inside of backward, before gradients are added over processes."
            "\nTake another optimizer. At stages 2 and 3 each process holds a slice of the gradients; 'adafactor' keeps"
            " little state."
        )
    return optimizer


def check_full_eval(args: Any, precision: MixedPrecision | None) -> None:
    """Refuse a precision of Trainer's evaluations that is not the one of training."""
    half = {"fp16_full_eval": torch.float16, "bf16_full_eval": torch.bfloat16}
    for name, dtype in half.items():
        if getattr(args, name) and (precision is None or precision.compute != dtype):
            raise ConfigError(
                f"{name}=True casts the weights, of which each rank holds a slice in the precision of training. "
                f"Train in it, too ({name[:4]}=True), or leave it out."
            )
