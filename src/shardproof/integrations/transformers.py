"""Our engine under transformers' Trainer and every trainer derived from it (TRL's among them).

A mixin that overrides methods of the Trainer; nothing in transformers, accelerate or TRL is patched:

    class ShardedSFTTrainer(ShardedTrainerMixin, SFTTrainer): ...
    trainer = ShardedSFTTrainer(model=model, args=args, ..., stage=3)
    trainer = sharded(DPOTrainer)(model=model, args=args, ..., stage=3)        # the same for any trainer

[Note: what trainers are told] To the trainer this is an ordinary model in an ordinary process: neither DeepSpeed nor
FSDP is on. So it neither unwraps the model for generation, nor gathers parameters around its own code, nor prepares a
reference in a special way: it does all this only because those engines need it, and this one does not.
tests/integrations/test_asked.py lists every place where transformers and TRL check.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardproof
from shardproof.errors import CheckpointError, ConfigError, NonFiniteError
from shardproof.integrations.averaged import AveragedLoss
from shardproof.integrations.counted import CountedOnce
from shardproof.integrations.prepared import (
    adds_up_whole,
    check_full_eval,
    compile_units,
    hybrid_mesh,
    is_sharded,
    meeting_before,
    noted,
    refuse_others,
    shard_prepared,
    stepping,
    together,
)
from shardproof.integrations.prepared import shard_as as shard_as
from shardproof.integrations.readback import check_saved
from shardproof.integrations.saved import (
    adapters_of,
    as_saved,
    pick_adapters,
    readable_as_the_rest,
    saved_names,
    state_dict_of,
)
from shardproof.integrations.server import asks_all_ranks, serve_weights
from shardproof.integrations.weights import places_in_model, stream_weights
from shardproof.zero.tensors.norms import learning_parameters

if TYPE_CHECKING:
    from shardproof import MixedPrecision


STATE = "shardproof"  # in Trainer's checkpoints: optimizer, scheduler, and the parts of the weights


class ShardedTrainerMixin(CountedOnce, AveragedLoss):
    """Shards the model when the optimizer is created, and leaves its class unchanged: there is nothing to unwrap.

    Put it before the trainer's class. The trainer sees an ordinary model on each rank, so DeepSpeed and FSDP must be
    off.

    Args:
        stage: the stage of the trained model, as for `shardproof.shard`.
        mixed_precision: its precision. Default: bf16 or fp16 if the trainer's arguments set `bf16` or `fp16`, with
            master weights in the dtype in which the model was loaded. In fp16, losses are scaled dynamically (torch's
            GradScaler, on `accelerator.scaler`).
        frozen_stage: the stage of every other model that the trainer prepares, which are those it does not train
            (reference, reward model, teacher). Default: `stage`.
        frozen_precision: their precision. Default: that of the trained model. `shard_as(model, stage, mixed_precision)`
            sets both for a single model, even for one of several trained ones.
        shard_group: the number of ranks that share one copy of each model, for example the ranks of a node; copies are
            kept equal. Default: all ranks share one.
        offload: what is kept off the device, as for `shardproof.shard`.
        keep_gathered: what stays gathered on the device, as for `shardproof.shard`.

    A trainer that trains more than one model (a value model besides the policy) names the others in `also_trained`.

    Raises:
        ConfigError: the arguments enable DeepSpeed or FSDP; `shard_group` does not divide the ranks.
    """

    also_trained: Sequence[nn.Module] = ()
    adapters_saved = staticmethod(adapters_of)  # the adapters that `_save` writes

    def __init__(
        self,
        *args: Any,
        stage: int = 3,
        mixed_precision: MixedPrecision | None = None,
        frozen_stage: int | None = None,
        frozen_precision: MixedPrecision | None = None,
        shard_group: int | None = None,
        offload: str | None = None,
        keep_gathered: int = 0,
        **kwargs: Any,
    ) -> None:
        self.shard_stage, self.shard_group = stage, shard_group
        self.shard_options: dict[str, Any] = {"offload": offload, "keep_gathered": keep_gathered}
        self.shard_precision = mixed_precision
        self.frozen_stage = stage if frozen_stage is None else frozen_stage
        self.frozen_precision = frozen_precision
        self._sharded_model: Any = lambda: None
        super().__init__(*args, **kwargs)
        generation = getattr(self, "vllm_generation", None)
        if generation is not None:
            serve_weights(generation, self.model, is_sharded)

    # --- one engine ----------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, replace its preparation of models, and meet before its collectives.

        Every trainer passes the models that it does not train to `accelerator.prepare_model` at the end of its own
        `__init__`. Methods are replaced on this trainer's accelerator, since transformers chooses the class.
        """
        own = self.args
        refuse_others(DeepSpeed=own.deepspeed, FSDP=own.fsdp, parallelism_config=own.parallelism_config)
        own._n_gpu = min(own.n_gpu, 1)  # if a process sees several GPUs, Trainer would use DataParallel
        super().create_accelerator_and_postprocess()
        accelerator = self.accelerator
        refuse_others(
            DeepSpeed=self.is_deepspeed_enabled,
            FSDP=self.is_fsdp_enabled,
            parallelism_config=accelerator.parallelism_config,
        )
        if self.shard_precision is None and (own.bf16 or own.fp16):
            compute = torch.float16 if own.fp16 else torch.bfloat16
            self.shard_precision = shardproof.MixedPrecision(compute=compute, reduce=torch.float32)
        check_full_eval(own, self.shard_precision)
        if self.shard_precision is not None and self.shard_precision.compute is torch.float16:
            accelerator.scaler = torch.amp.GradScaler(accelerator.device.type)
        accelerator.prepare_model = functools.partial(self._prepare_model, accelerator.prepare_model)
        meeting_before(accelerator, self._meet)
        gather = accelerator.gather_for_metrics  # Trainer holds the original one
        self.gather_function = functools.partial(gather, use_gather_object=own.eval_use_gather_object)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The model already computes in the precision that `bf16_full_eval` asks for, and must not be cast."""
        args_, before = self.args, (self.args.fp16_full_eval, self.args.bf16_full_eval)
        args_.fp16_full_eval = args_.bf16_full_eval = False
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            args_.fp16_full_eval, args_.bf16_full_eval = before

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Under fp16 the engine does the casting and the scaler is ours: accelerate's own needs a GPU, and lets each
        rank decide by itself whether there was an overflow."""
        found: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        return found | {"mixed_precision": "no"} if self.args.fp16 else found

    def _meet(self) -> None:
        if self._sharded:
            shardproof.barrier(self.model)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Trainer gathers here without the accelerator, while a callback of one rank may still need the others'
        slices."""
        if self.control.should_log or self.control.should_evaluate or self.control.should_save:
            self._meet()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def store_flos(self) -> None:
        """The same, also at the end of training."""
        self._meet()
        super().store_flos()

    def _prepare_model(
        self, prepare: Any, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Replaces the accelerator's method: shards the trained model as such, and any other as a frozen one."""
        if model is getattr(self, "model", None):
            self._shard()
        elif evaluation_mode and not is_sharded(model):
            self.shard_frozen(model)
        if is_sharded(model):
            return noted(self.accelerator, model)
        return prepare(model, device_placement, evaluation_mode)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave a model that is to be sharded in place: `shard` moves one slice at a time."""
        if model is not getattr(self, "model", model):
            super()._move_model_to_device(model, device)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Shard, then create the optimizer: its parameters are the slices from the start."""
        self._shard()
        made: torch.optim.Optimizer = super().create_optimizer(*([] if model is None else [model]))
        return stepping(made)  # type: ignore[no-any-return]

    def _shard(self) -> None:
        if self._sharded:
            return
        self._saved_names = saved_names(self.model)
        for model in self._trained:
            self._shard_one(model, self.shard_stage, self.shard_precision)
            if self.args.torch_compile:
                compile_units(model, backend=self.args.torch_compile_backend, mode=self.args.torch_compile_mode)
        self._sharded_model = weakref.ref(self.model)

    @property
    def _sharded(self) -> bool:
        """Whether the current model is sharded: `model_init` creates one for each training."""
        model = self._sharded_model()
        return model is not None and model is self.model

    @functools.cached_property
    def _mesh(self) -> DeviceMesh | None:
        return hybrid_mesh(self.shard_group, self.args.device)

    @property
    def _trained(self) -> list[nn.Module]:
        return [self.model, *self.also_trained]

    @property
    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for model in self._trained for parameter in learning_parameters(model)]

    def shard_frozen(self, model: nn.Module) -> nn.Module:
        """Shard a model that is never trained, in place, at its own stage and in its own precision."""
        model.requires_grad_(False).eval()
        precision = self.frozen_precision or self.shard_precision
        return self._shard_one(model, self.frozen_stage, precision)

    def _shard_one(self, model: nn.Module, stage: int, precision: MixedPrecision | None) -> nn.Module:
        return shard_prepared(model, stage, precision, self.args.device, self._mesh, **self.shard_options)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """For TRL trainers that can run the reference once, before training: without a reference, it is the policy."""
        if getattr(self, "ref_model", None) is None:
            self._shard()
        return super()._precompute_ref_logps(*args, **kwargs)

    # --- generation ----------------------------------------------------------------------------------

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """For GRPO, RLOO and the like, inside `_generate`: called once, and again if answers call functions, which may
        differ between ranks."""
        if asks_all_ranks(self):
            self._meet()
        return super()._generate_single_turn(*args, **kwargs)

    def generate_on_policy_outputs(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """For GKD and the like; the model is the student or the teacher."""
        with together(model):
            return super().generate_on_policy_outputs(model, *args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """For online DPO, distillation and, around the method above, GRPO and RLOO."""
        with together(self.model):
            return super()._generate(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        """For GRPO and RLOO, which gather rewards without the accelerator: ranks whose answers differ in length may
        still be gathering other units."""
        self._meet()
        return super()._calculate_rewards(*args, **kwargs)

    # --- a step --------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One micro-batch. Stages 0 and 1 reduce gradients at the last one of a step; stages 2 and 3 at each, since
        between micro-batches they promise to hold only a slice of the gradients, if there are slices."""
        self._check_scale()
        with contextlib.ExitStack() as stack:
            for trained in [] if self.accelerator.sync_gradients else self._trained:
                if adds_up_whole(trained):
                    stack.enter_context(shardproof.no_sync(trained))
            return super().training_step(model, *args, **kwargs)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        self._unscale()
        return shardproof.clip_grad_norm_(self._parameters, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None:
            self._unscale()
            grad_norm = shardproof.clip_grad_norm_(self._parameters, float("inf"))
        return grad_norm

    def _unscale(self) -> None:
        """Under fp16: unscale gradients. Every rank learns of an overflow on any rank, so that all skip the same
        steps."""
        if self.accelerator.scaler is not None:
            optimizer = self.optimizer.optimizer
            # A fused optimizer would skip the step inside its kernel, and the schedule would advance.
            optimizer._step_supports_amp_scaling = False
            self.accelerator.scaler.unscale_(optimizer)

    def _check_scale(self) -> None:
        scaler = self.accelerator.scaler
        if scaler is not None and self.accelerator.optimizer_step_was_skipped and scaler.get_scale() < 1.0:
            raise NonFiniteError(
                "The gradients are not finite in fp16, however small the loss scale. Lower the learning rate, look for "
                "a division by zero in the loss, or train in bf16."
            )

    # --- what is left --------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the same files as `save_pretrained`, each rank its part. Every rank must call it."""
        if not self._sharded:
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(output_dir or self.args.output_dir)
        if not self._streamed(folder):
            self._save_gathered(folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _streamed(self, folder: Path) -> bool:
        """Write the weights from all ranks. Returns whether it was done: a trainer with its own `_save` may process the
        weights in any way, and some files differ from the model's layout (see `places_in_model`)."""
        known = type(self)._save.__module__.partition(".")[0] in ("transformers", __name__.partition(".")[0])
        if not known or places_in_model(self.model) is None:
            return False
        if self.args.should_save:
            self._save(str(folder), state_dict={})
        return stream_weights(self.model, folder, dtype=getattr(self, "saved_dtype", None))

    def _save_gathered(self, folder: Path) -> None:
        """Gather the weights to save on rank 0: for a PEFT model, the adapters."""
        with state_dict_of(self.model, self._saved_names):
            weights = shardproof.full_state_dict(self.model, rank0_only=not adapters_of(self.model))
        if (dtype := getattr(self, "saved_dtype", None)) is not None:
            made = {id(value): value.to(dtype) for value in weights.values() if _is_float(value)}  # tied weights once
            weights = {name: made.get(id(value), value) for name, value in weights.items()}
        if self.args.should_save:
            self._save(str(folder), state_dict=weights)
            readable_as_the_rest(folder)
            ignored = getattr(self.model, "_keys_to_ignore_on_save", None) or ()
            check_saved(folder, as_saved(self.model, weights), ignored)
        else:
            # PEFT reads the state of modules, which gathers it: so on all ranks, for the same adapters.
            pick_adapters(self.model, weights, self.adapters_saved(self.model))
        self._meet()  # the other ranks may hold less, and gather more

    # --- Trainer's checkpoints: its weights, plus the state that each rank holds ------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.also_trained:
            raise ConfigError(
                f"{type(self).__name__} trains {len(self._trained)} models with one optimizer, whose state cannot be "
                "saved. Use save_only_model=True or save_strategy='no'."
            )
        folder, frozen = os.path.join(output_dir, STATE), not adapters_of(self.model)
        shardproof.save(
            self.model, self.optimizer, folder, asynchronous=False, frozen=frozen, scheduler=self.lr_scheduler
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load them; the unsharded state of a checkpoint that Trainer wrote without us is sharded at the first step.

        Raises:
            CheckpointError: the checkpoint holds weights only.
        """
        if checkpoint is None:
            return
        if os.path.isdir(os.path.join(checkpoint, STATE)):
            folder = os.path.join(checkpoint, STATE)
            shardproof.load(self.model, self.optimizer, folder, scheduler=self.lr_scheduler)
        elif any(name.startswith("optimizer") for name in os.listdir(checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            raise CheckpointError(
                f"{checkpoint} holds weights only (save_only_model=True): without optimizer state training cannot be "
                "resumed. Load the weights as a model and train from there."
            )


@functools.cache
def sharded(trainer: type[Any]) -> type[Any]:
    """The trainer class on our engine: the mixin and the trainer's class, under the name `Sharded...`.

        trainer = sharded(DPOTrainer)(model=model, args=args, train_dataset=pairs, stage=3)

    Its arguments are the trainer's own and those of `ShardedTrainerMixin`. Repeated calls return the same class.
    """
    if issubclass(trainer, ShardedTrainerMixin):
        return trainer
    return type(f"Sharded{trainer.__name__}", (ShardedTrainerMixin, trainer), {"__module__": trainer.__module__})


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
