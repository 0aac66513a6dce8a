"""The engine that `initialize` returns: DeepSpeed's loop over a model sharded by `shardproof.shard`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import shardproof
from shardproof.errors import ConfigError, EngineError
from shardproof.integrations.deepspeed import checkpoint
from shardproof.integrations.deepspeed.answers import Answers
from shardproof.integrations.deepspeed.config import Batch, say_once
from shardproof.integrations.deepspeed.scaling import LossScale
from shardproof.integrations.deepspeed.sections import Settings


class DeepSpeedEngine(Answers):
    """Forward, backward and step of one model, as a DeepSpeed script calls them.

    `backward` divides the loss by the accumulation steps; `step` acts at the end of an accumulation only: it
    unscales, clips, steps the optimizer and the schedule, and clears the gradients. Every rank must call it.

    Attributes:
        module: the model itself, sharded in place.
        optimizer, lr_scheduler, training_dataloader: what `initialize` returned; each may be None.
        global_steps: optimizer steps so far, including those skipped for an overflow (`skipped_steps`).
        micro_steps: calls of `step`.
        running: the number of `backward` calls in progress, over all engines: a loss may come from several.
    """

    running: ClassVar[int] = 0

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        sizes: Batch,
        device: torch.device,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        collate_fn: Any = None,
        config: Any = None,
    ) -> None:
        super().__init__()
        self.module, self.device, self.config = module, device, config
        self.settings, self.sizes = settings, sizes
        self.optimizer, self.lr_scheduler, self.collate_fn = optimizer, lr_scheduler, collate_fn
        self.training_dataloader: DataLoader[Any] | None = None
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        half = settings.torch_autocast.enabled and settings.torch_autocast.torch_dtype == torch.float16
        self.loss_scale_of = LossScale(
            settings.fp16.model_copy(update={"enabled": settings.fp16.enabled or half}), device
        )
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.global_rank = dist.get_rank() if dist.is_initialized() else 0
        self.local_rank = dist.get_node_local_rank(fallback_rank=0)
        self.dp_world_size = self.world_size
        self._norm: float | None = None
        self._boundary: bool | None = None
        self._applied = self._in_step = self._scaled = False
        self._no_sync = 0
        self._backwards = 0

    def __getattr__(self, name: str) -> Any:
        """Attributes that the engine lacks are looked up in the model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            text = (
                f"Neither this {type(self).__name__} of shardproof nor its {type(self.module).__name__} has '{name}'."
            )
            raise AttributeError(text, name=name, obj=self) from error

    # --- forward and backward -----------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        autocast = self.settings.torch_autocast
        with torch.autocast(self.device.type, autocast.torch_dtype) if autocast.enabled else _nothing():
            outputs = self.module(*args, **kwargs)
        if torch.is_grad_enabled() and (self.gradient_accumulation_steps() > 1 or self.loss_scale_of.on):
            outputs = tree_map(lambda value: _Output.apply(value, self) if _in_graph(value) else value, outputs)
        return outputs

    def of_output(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of an output. For `loss.backward()` without the engine, the division by accumulation steps is
        done here."""
        if DeepSpeedEngine.running:
            return grad
        if self.loss_scale_of.on and not self._scaled:
            raise EngineError("Under fp16 the loss must be scaled: use engine.backward(loss) or engine.scale(loss).")
        return grad / self.gradient_accumulation_steps()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for your own `backward()`."""
        self._scaled = True
        return self.loss_scale_of.apply(loss)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backward pass of a scalar loss. Returns the loss divided by the accumulation steps."""
        self._need_optimizer("backward")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise EngineError("engine.backward takes a scalar loss. For other outputs call their own backward(grad).")
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        DeepSpeedEngine.running += 1
        try:
            with self._reduction():
                self.loss_scale_of.apply(loss).backward(retain_graph=retain_graph)
        finally:
            DeepSpeedEngine.running -= 1
        self._backwards += 1
        return loss

    def _reduction(self) -> contextlib.AbstractContextManager[None]:
        """Stages 0 and 1 reduce gradients at the end of an accumulation; stages 2 and 3 at each backward pass, since
        between these they promise to hold only a slice of the gradients."""
        now = self.is_gradient_accumulation_boundary() or self.zero_optimization_stage() >= 2
        return _nothing() if now else shardproof.no_sync(self.module)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside do not reduce gradients. Works at every stage."""
        self._no_sync += 1
        try:
            with shardproof.no_sync(self.module):
                yield
        finally:
            self._no_sync -= 1

    # --- accumulation and step ------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last one of an optimizer step."""
        if self._boundary is not None:
            return self._boundary
        if not self.settings.managed_gradient_accumulation:
            return self._in_step
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set the boundary yourself, instead of by the count."""
        if not self.settings.managed_gradient_accumulation:
            raise EngineError("With managed_gradient_accumulation: false every step() ends an accumulation.")
        self._boundary = is_boundary

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At the end of an accumulation: clip, step, clear gradients. Otherwise: count."""
        optimizer = self._need_optimizer("step")
        if self._no_sync:
            raise EngineError("engine.step() inside engine.no_sync(): leave the context first.")
        self._in_step, self._applied = True, False
        try:
            if self.is_gradient_accumulation_boundary():
                self._take_step(optimizer, lr_kwargs or {})
        finally:
            self._in_step = self._scaled = False
        self.micro_steps += 1

    def _take_step(self, optimizer: torch.optim.Optimizer, lr_kwargs: dict[str, Any]) -> None:
        scale, limit = self.loss_scale_of, self.settings.gradient_clipping
        scale.unscale(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._norm = float(shardproof.clip_grad_norm_(params, limit if limit > 0 else math.inf))
        checked = scale.on or (self.settings.bf16.enabled and self.settings.bf16.check_grad_overflow)
        self._applied = not checked or math.isfinite(self._norm)
        if self._applied:
            optimizer.step()
        else:
            self.skipped_steps += 1
        optimizer.zero_grad()
        scale.update(overflow=not self._applied)
        if self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        managed = self.settings.managed_gradient_accumulation
        self.global_samples += self.sizes.train if managed else self.sizes.micro * self._backwards * self.world_size
        self._backwards = 0
        every = self.settings.steps_per_print
        if every and self.global_rank == 0 and self.global_steps % every == 0:
            text = f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}"
            print(text, flush=True)

    def _need_optimizer(self, what: str) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise EngineError(
                f"engine.{what}() needs an optimizer: pass optimizer= to initialize, or name one in the configuration."
            )
        return self.optimizer

    def zero_grad(self) -> None:  # type: ignore[override]
        """Clear the gradients. `step` does it already; in the middle of an accumulation this drops the gradients so
        far."""
        if self._backwards:
            say_once(
                "engine.zero_grad() between backward and step drops the gradients so far, at every stage (DeepSpeed "
                "keeps them at stages 2 and 3). Leave it out: engine.step() clears them."
            )
        self.module.zero_grad()

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the weights: not between accumulations, nor after an overflow."""
        return self._applied

    def compile(self, backend: str = "inductor", compile_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        """Compile the blocks of the model, each separately; gathering stays outside the compiled code."""
        for unit in self.module.__dict__["_shardproof"].units[1:]:
            for block in unit.entries:
                block.compile(backend=backend, **(compile_kwargs or {}))

    def empty_partition_cache(self) -> None:
        """Nothing to do: parameters kept gathered for passes without gradients are released when training continues."""

    def destroy(self) -> None:
        """Release optimizer, schedule and loader."""
        self.optimizer = self.lr_scheduler = self.training_dataloader = None

    # --- data and weights -------------------------------------------------------------------------------

    def deepspeed_io(
        self, dataset: Any, batch_size: int | None = None, data_sampler: Any = None, collate_fn: Any = None, **_: Any
    ) -> DataLoader[Any]:
        """A loader of this rank's micro-batches of `dataset`."""
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data_sampler = DistributedSampler(dataset, self.world_size, self.global_rank)
        return DataLoader(
            dataset,
            batch_size=batch_size or self.sizes.micro,
            sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            drop_last=self.settings.dataloader_drop_last,
            pin_memory=self.device.type != "cpu",
        )

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Full weights on the CPU, on every rank. Every rank must call it."""
        return self._whole_weights(exclude_frozen_parameters, rank0_only=False)

    def _whole_weights(self, exclude_frozen: bool, rank0_only: bool) -> dict[str, Any]:
        frozen = {name for name, p in self.module.named_parameters() if exclude_frozen and not p.requires_grad}
        state = shardproof.full_state_dict(self.module, rank0_only=rank0_only)
        return {name: value for name, value in state.items() if name not in frozen}

    def load_module_state_dict(self, state_dict: dict[str, Any], strict: bool = True, **_: Any) -> None:
        """Load full weights; the dict of rank 0 counts. Every rank must call it."""
        shardproof.load_full_state_dict(self.module, state_dict.get("module", state_dict), strict=strict)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Full weights in the compute dtype, on the CPU of rank 0; None elsewhere. Not public, but many scripts save
        with it. Every rank must call it."""
        weights = self._whole_weights(exclude_frozen_parameters, rank0_only=True)
        return checkpoint.in_dtype(weights, self.get_data_types()[0]) if self.global_rank == 0 else None

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write full weights, in the compute dtype, to one file that `torch.load` reads, at every stage. Every
        rank must call it."""
        weights = self.module_state_dict(exclude_frozen_parameters)
        checkpoint.write_weights(weights, Path(save_dir) / save_filename, self.get_data_types()[0])
        return True

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything to `save_dir`/`tag` (default: global_stepN) and name it in `save_dir`/latest. It can be
        loaded at any stage and on any number of ranks. Every rank must call it.

        Raises:
            CheckpointError: on all ranks: a value of `client_state` is not a plain one, or writing failed.
        """
        frozen = not exclude_frozen_parameters
        checkpoint.save(self, save_dir, tag, client_state or {}, latest=save_latest, frozen=frozen)
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load `load_dir`/`tag`, or the tag that `load_dir`/latest names. Every rank must call it.

        Returns: the folder and the client state; None and None if there is no `latest`.

        Raises:
            CheckpointError: on all ranks: not a checkpoint of this model, or a damaged one.
        """
        if not load_module_strict or custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint loads complete checkpoints only: load_module_strict=False and custom_load_fn= are not "
                "supported. Load weights of another model with engine.load_module_state_dict(weights, strict=False)."
            )
        everything = not load_module_only
        return checkpoint.load(
            self,
            load_dir,
            tag,
            optimizer=load_optimizer_states and everything,
            schedule=load_lr_scheduler_states and everything,
            counters=everything,
        )


class _Output(torch.autograd.Function):
    """An output of the model, whose gradient passes through the engine. A hook on the output itself would not do: one
    output may be computed from another, whose gradient would be divided twice."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, engine: DeepSpeedEngine) -> torch.Tensor:
        ctx.engine = engine
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.engine.of_output(grad), None


def _in_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _nothing() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()
