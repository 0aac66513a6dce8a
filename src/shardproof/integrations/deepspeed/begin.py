"""`initialize`: from a model and a DeepSpeed configuration to the engine, the optimizer, the loader, the schedule."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardproof
from shardproof.errors import ConfigError
from shardproof.integrations.deepspeed import config as reading
from shardproof.integrations.deepspeed import optimizers, schedules
from shardproof.integrations.deepspeed.answers import compute_dtype
from shardproof.integrations.deepspeed.comm import init_distributed
from shardproof.integrations.deepspeed.engine import DeepSpeedEngine
from shardproof.integrations.deepspeed.sections import Settings
from shardproof.integrations.deepspeed.utils import OPTIMIZERS
from shardproof.zero.device import default_device
from shardproof.zero.tensors.parameter import ShardedParameter

_REDUCE = {"fp16": torch.float16, "bf16": torch.bfloat16}


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, torch.optim.Optimizer | None, Any, Any]:
    """Shard `model` according to a DeepSpeed configuration, and return what trains it.

    Args:
        args: an object with `deepspeed_config`, if `config` is not given.
        model: any module; it is sharded in place.
        optimizer: a torch optimizer, or a function that makes one from `model_parameters`; takes precedence over the
            configuration's.
        model_parameters: what the configuration's optimizer trains: tensors or groups. Default: all parameters of the
            model.
        training_data: a dataset; the third result is a loader for it.
        lr_scheduler: a scheduler, or a function that makes one from the optimizer; takes precedence over the
            configuration's. The engine steps it.
        distributed_port: accepted for the sake of old scripts; the launcher chooses the port.
        dist_init_required: False if the script makes the process group itself.
        collate_fn: for the loader.
        config: a dict, the path of a JSON file, or a JSON text in base64. `config_params` is its older name.

    Returns: the engine, the optimizer, the loader and the scheduler; the last three may be None.

    Raises:
        ConfigError: an entry of the configuration is unknown or invalid, or ignoring it would silently change what is
            trained.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"initialize needs a model: pass model=, a torch.nn.Module (it has {type(model).__name__}).")
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise ConfigError(
                f"initialize({name}=...) is for model or sequence parallelism, which is not supported here."
            )
    config = _configuration(args, config if config is not None else config_params)
    settings, unused = reading.read(config)
    if dist_init_required is not False:
        init_distributed()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    sizes = reading.batch(settings, ranks)
    if unused:
        reading.say_once(
            f"These keys of the DeepSpeed configuration have no meaning here and are not applied: {', '.join(unused)}."
        )
    device = _shard(model, settings, ranks)
    made = _optimizer(settings, model, optimizer, model_parameters)
    if made is not None:
        OPTIMIZERS.add(made)
    schedule = _schedule(settings, made, lr_scheduler)
    engine = DeepSpeedEngine(
        model, settings, sizes, device, optimizer=made, lr_scheduler=schedule, collate_fn=collate_fn, config=config
    )
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, made, engine.training_dataloader, schedule


def _configuration(args: Any, config: Any) -> Any:
    of_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if of_args is not None and config is not None:
        raise ConfigError("Two DeepSpeed configurations were given: --deepspeed_config and config=. Pass one.")
    if of_args is None and config is None:
        raise ConfigError(
            "There is no DeepSpeed configuration: pass config=, or --deepspeed_config on the command line."
        )
    return config if of_args is None else of_args


def _shard(model: nn.Module, settings: Settings, ranks: int) -> torch.device:
    device, stage, dtype = default_device(), settings.zero_optimization.stage, compute_dtype(settings)
    offload = settings.zero_optimization.offload()
    if offload in ("optimizer", "all") and device.type == "cpu":
        reading.say_once(
            "DeepSpeed configuration: offload: this run computes on the CPU, so everything is there already."
        )
    reduce = _REDUCE.get(settings.communication_data_type or "")
    precision = None
    if dtype or reduce:
        compute = dtype or next(model.parameters()).dtype
        precision = shardproof.MixedPrecision(compute=compute, reduce=reduce or torch.float32)
    shardproof.shard(model, stage, mixed_precision=precision, device=device, offload=offload)
    return device


def _optimizer(
    settings: Settings, model: nn.Module, given: Any, model_parameters: Iterable[Any] | None
) -> torch.optim.Optimizer | None:
    if isinstance(given, torch.optim.Optimizer):
        _check_parameters(given, model)
        return given
    if given is None and settings.optimizer is None:
        return None
    parameters = list(model.parameters() if model_parameters is None else model_parameters)
    if callable(given):
        made = given(parameters)
    elif settings.optimizer is not None:
        made = optimizers.make(settings.optimizer, parameters)
    else:
        raise ConfigError(
            f"initialize(optimizer=...) takes a torch optimizer, or a function that makes one, not {given!r}."
        )
    _check_parameters(made, model)
    return made


def _check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """An optimizer must hold the parameters as they are after sharding."""
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    if not any(isinstance(p, ShardedParameter) for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            f"The {type(optimizer).__name__} holds no parameter of the {type(model).__name__}. Create it with the "
            "parameters of the model that is passed to initialize."
        )


def _schedule(settings: Settings, optimizer: torch.optim.Optimizer | None, given: Any) -> Any:
    if optimizer is None:
        return None
    if given is not None:
        return given(optimizer) if callable(given) else given
    return schedules.make(settings.scheduler, optimizer) if settings.scheduler is not None else None


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add to `parser` the options --deepspeed and --deepspeed_config."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="train with the configuration below")
    group.add_argument("--deepspeed_config", metavar="FILE", help="DeepSpeed's JSON file")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", help=argparse.SUPPRESS)
    return parser
