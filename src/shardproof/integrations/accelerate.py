"""Our engine under hand-written loops: Accelerate's `Accelerator`, with a sharding stage.

    from shardproof.integrations.accelerate import Accelerator
    accelerator = Accelerator(stage=3)

Everything else is Accelerate's own: its data loaders, schedulers, trackers and metrics. Where Accelerate would wrap a
model in DDP, `prepare` shards it in place; so a model keeps its class and there is nothing to unwrap. Only
`accelerate.local_sgd` is not supported: it lets the processes' models diverge for a while; here there is a single
model.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import shardproof
from shardproof.errors import ConfigError
from shardproof.integrations.prepared import check_processes, filled_up, meeting_first, stepping
from shardproof.integrations.saved import adapters_of, saved_names, state_dict_of
from shardproof.integrations.weights import places_of_entries, stream_weights
from shardproof.zero.checks import engine_of, has_engine

if TYPE_CHECKING:
    from shardproof import MixedPrecision

try:
    import accelerate
    from accelerate.utils import DDPCommunicationHookType, DistributedType
    from accelerate.utils.modeling import convert_file_size_to_int
except ImportError as error:  # pragma: no cover - told to the user
    raise ConfigError(
        "shardproof.integrations.accelerate needs Accelerate: pip install 'accelerate>=1.10.1'."
    ) from error

_NOT_OURS = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin")


class Accelerator(accelerate.Accelerator):
    """Accelerate's `Accelerator` over models sharded by `shardproof.shard`.

    Args:
        stage: 0 replicates everything; 1 shards optimizer state; 2 gradients too; 3 parameters too.
        shard_options: further arguments of `shardproof.shard`: `units`, `dynamic`, `desync_timeout`,
            `inference_memory`, `offload`, `keep_gathered`.
        *args: as for `accelerate.Accelerator`.
        **kwargs: as for `accelerate.Accelerator`. `mixed_precision="bf16"` computes under autocast with weights
            gathered in bf16 and float32 masters; plugins for other engines are refused.

    Raises:
        ConfigError: a plugin for, or a launcher that asks for, DeepSpeed, FSDP, Megatron or another parallelism; a DDP
            hook that changes how gradients are reduced.
    """

    def __init__(self, *args: Any, stage: int = 3, shard_options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        given = [name for name in (*_NOT_OURS, "parallelism_config") if kwargs.get(name) is not None]
        if given:
            raise ConfigError(f"Accelerator({given[0]}=...) is for another engine. Leave it out and pass stage=.")
        if not torch.accelerator.is_available() and len(args) < 5:
            kwargs.setdefault("cpu", True)  # Accelerate would otherwise not see the other processes
        super().__init__(*args, **kwargs)
        others = [name for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM") if hasattr(DistributedType, name)]
        if self.distributed_type.name in others:
            raise ConfigError(
                f"The launcher asks Accelerate for {self.distributed_type.name}. Start with torchrun, or with "
                "`accelerate launch --multi_gpu` (`--cpu` without accelerators), and pass stage= to Accelerator."
            )
        if self.mixed_precision == "fp8":
            raise ConfigError("Accelerator(mixed_precision='fp8') is not supported. Use 'bf16'.")
        _refuse_hook(self.ddp_handler)
        self.stage = stage
        self.shard_options = shard_options or {}

    # --- preparing ------------------------------------------------------------------------------------

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard `model` in place. It stays the same object of the same class."""
        if not has_engine(model) and not getattr(model, "_is_accelerate_prepared", False):
            shardproof.shard(
                model, self.stage, mixed_precision=self._precision(), device=self.device, **self.shard_options
            )
            check_processes(self)
        # In evaluation mode Accelerate does everything except wrap the model in DDP.
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Like Accelerate's; refuses an optimizer that does not step in `step`."""
        return super().prepare_optimizer(stepping(optimizer), *args, **kwargs)

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Like Accelerate's, with a meeting of all processes before the loader communicates."""
        return meeting_first(super().prepare_data_loader(*args, **kwargs), self._meet)

    def skip_first_batches(self, *args: Any, **kwargs: Any) -> Any:
        """Like `prepare_data_loader`."""
        return meeting_first(super().skip_first_batches(*args, **kwargs), self._meet)

    def _precision(self) -> MixedPrecision | None:
        if not self.native_amp:
            return None
        dtype = torch.float16 if self.mixed_precision == "fp16" else torch.bfloat16
        return shardproof.MixedPrecision(compute=dtype)

    # --- a step ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Backward passes inside do not reduce at stages 0 and 1. At stages 2 and 3 they do, with the same result:
        there a rank holds only a slice of the gradients."""
        here = has_engine(model) and model.__dict__["_shardproof"].stage < 2
        with shardproof.no_sync(model) if here else contextlib.nullcontext():
            yield

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Nothing to do: the first backward pass outside `no_sync` reduces everything."""
        yield

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scale gradients so that their global norm is at most `max_norm`. Returns the norm before scaling."""
        self.unscale_gradients()
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        return shardproof.clip_grad_norm_(params, max_norm, norm_type)

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Nothing to do if loaders distribute batches evenly, which they do by default.

        Raises:
            ConfigError: they do not. A process may have fewer micro-batches than others, but must take as many steps.
        """
        if not (self.even_batches if even_batches is None else even_batches) and self.num_processes > 1:
            raise ConfigError(
                "join_uneven_inputs(even_batches=False): processes that leave the loop early cannot be joined here. "
                "Keep even_batches=True, or call optimizer.step() equally often on every process, even without a batch."
            )
        yield

    # --- between processes ----------------------------------------------------------------------------

    def _meet(self) -> None:
        """A process that gathers cannot lend its slices to one that still computes: wait for all, lending meanwhile."""
        for model in self._models:
            if has_engine(model):
                shardproof.barrier(model)

    def gather(self, tensor: Any) -> Any:
        self._meet()
        return super().gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        self._meet()
        return super().gather_for_metrics(filled_up(self, input_data), use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        self._meet()
        return super().reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        self._meet()
        return super().pad_across_processes(tensor, dim, pad_index, pad_first)

    def wait_for_everyone(self) -> None:
        self._meet()
        super().wait_for_everyone()

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The others wait for the main process to leave the block, and lend their slices meanwhile."""
        yield from self._goes_first(self.is_main_process)

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Like `main_process_first`, on each machine."""
        yield from self._goes_first(self.is_local_main_process)

    def _goes_first(self, first: bool) -> Iterator[None]:
        if not first:
            self.wait_for_everyone()
        yield
        if first:
            self.wait_for_everyone()

    def end_training(self) -> None:
        """Wait for processes that still compute, then do what Accelerate does."""
        self._meet()
        super().end_training()

    # --- weights --------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Full weights on the CPU of the main process. The others get an empty dict or, for a PEFT model, the weights
        that it saves: PEFT selects these on all processes. Every process must call it."""
        model = self.unwrap_model(model) if unwrap else model
        if not has_engine(model):
            return super().get_state_dict(model, unwrap)
        weights = shardproof.full_state_dict(model)
        if adapters_of(model):
            with state_dict_of(model, saved_names(model)):
                picked = shardproof.full_state_dict(model, rank0_only=False)
            weights = weights or picked
        return weights

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write full weights. Every process must call it, and writes its part of them.

        With `safe_serialization=False` the main process gathers them and writes a pickle.
        """
        inner, folder = self.unwrap_model(model), Path(save_directory)
        size = convert_file_size_to_int(max_shard_size)
        in_parts = safe_serialization and has_engine(inner)
        if in_parts and stream_weights(inner, folder, size, find=places_of_entries):
            return
        weights = self.get_state_dict(model)
        if self.is_main_process:
            with _given(self, weights):
                super().save_model(model, save_directory, max_shard_size, safe_serialization)
        self.wait_for_everyone()

    # --- checkpoints ----------------------------------------------------------------------------------

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Any:
        """Save everything. Models and optimizers are saved by `shardproof.save`, so that they can be loaded at another
        stage and on another number of processes; the rest is saved by Accelerate. Every process must call it, although
        many scripts do so on the main one only."""
        for model in filter(has_engine, self._models):
            engine_of(model).meet("collect the state dict")  # named, unlike a gather that others may be in
        self._meet()
        models, pairs = self._models, self._pairs()
        where: list[Any] = []
        weights = [model.state_dict() for model in models]  # a hook removes those that it writes itself
        hooks = {
            key: functools.partial(_save_hook, hook, models, weights)
            for key, hook in self._save_model_state_pre_hook.items()
        }
        with self._without_models({**hooks, "shardproof": lambda _, __, folder: where.append(folder)}, {}):
            location = super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
        for number, (model, optimizer) in enumerate(pairs):
            with self._without_others(model, optimizer):
                shardproof.save(model, optimizer, _folder(where[0], number), asynchronous=False)
        self.wait_for_everyone()
        return location

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Load a `save_state` checkpoint, at any stage and number of processes. Every process must call it."""
        models, pairs = self._models, self._pairs()
        where: list[Any] = []
        hooks = {
            key: functools.partial(_load_hook, hook, models) for key, hook in self._load_model_state_pre_hook.items()
        }
        with self._without_models({}, {**hooks, "shardproof": lambda _, folder: where.append(folder)}):
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
        for number, (model, optimizer) in enumerate(pairs):
            with self._without_others(model, optimizer):
                shardproof.load(model, optimizer, _folder(where[0], number))

    def _pairs(self) -> list[tuple[nn.Module, torch.optim.Optimizer | None]]:
        """Each model with its first optimizer, followed by each model with its further optimizers."""
        first: list[tuple[nn.Module, torch.optim.Optimizer | None]] = []
        more: list[tuple[nn.Module, torch.optim.Optimizer | None]] = []
        for model in self._models:
            params = {id(p) for p in model.parameters()}
            mine = [
                wrapped.optimizer
                for wrapped in self._optimizers
                if any(id(p) in params for group in wrapped.param_groups for p in group["params"])
            ]
            first.append((model, mine[0] if mine else None))
            more += [(model, optimizer) for optimizer in mine[1:]]
        return first + more

    @contextlib.contextmanager
    def _without_others(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
        """Inside, an optimizer shared by several models holds only the parameters of this one: each model has its own
        checkpoint."""
        others = {id(p) for other in self._models if other is not model for p in other.parameters()}
        others -= {id(p) for p in model.parameters()}
        groups = [] if optimizer is None else optimizer.param_groups
        before = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) not in others]
        try:
            yield
        finally:
            for group, params in zip(groups, before, strict=True):
                group["params"] = params

    @contextlib.contextmanager
    def _without_models(self, save_hooks: dict[Any, Any], load_hooks: dict[Any, Any]) -> Iterator[None]:
        """Inside, Accelerate sees neither models nor optimizers, of which it would write one rank's slices."""
        names = ("_models", "_optimizers", "_save_model_state_pre_hook", "_load_model_state_pre_hook")
        before = {name: getattr(self, name) for name in names}
        inside: tuple[Any, ...] = ([], [], save_hooks, load_hooks)
        for name, value in zip(names, inside, strict=True):
            setattr(self, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)


def _refuse_hook(handler: Any) -> None:
    """Refuse a hook that changes DDP's gradients. The other fields of `DistributedDataParallelKwargs` do not affect
    DDP's results, and have no effect here."""
    hook = getattr(handler, "comm_hook", DDPCommunicationHookType.NO)
    if hook != DDPCommunicationHookType.NO:
        raise ConfigError(
            f"DistributedDataParallelKwargs(comm_hook={hook.name}) is for DDP, which wraps no model here. Leave it "
            "out.\nTo reduce gradients in bf16, call "
            "shardproof.shard(model, stage, mixed_precision=..., device=accelerator.device) before prepare, "
            "with shardproof.MixedPrecision(compute=torch.float32, reduce=torch.bfloat16)."
        )


@contextlib.contextmanager
def _given(accelerator: Accelerator, weights: dict[str, Any]) -> Iterator[None]:
    """Inside, `get_state_dict` returns these weights: all processes gather, but only one writes."""
    accelerator.get_state_dict = lambda model, unwrap=True: weights  # type: ignore[method-assign]
    try:
        yield
    finally:
        del accelerator.get_state_dict


def _save_hook(hook: Any, models: list[nn.Module], weights: list[Any], _: Any, __: Any, folder: Any) -> None:
    """Call a user's save hook with the models that are hidden from Accelerate. The hook may pop from the list, which is
    a copy."""
    hook(list(models), weights, folder)


def _load_hook(hook: Any, models: list[nn.Module], _: Any, folder: Any) -> None:
    """The same for a load hook."""
    hook(list(models), folder)


def _folder(location: str | os.PathLike[str], number: int) -> Path:
    return Path(location) / ("sharded" if number == 0 else f"sharded_{number}")
