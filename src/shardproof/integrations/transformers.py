"""Our engine under transformers' Trainer and every trainer derived from it (TRL's among them).

A mixin that overrides the Trainer's own seams; nothing in transformers, accelerate or TRL is patched:

    class ShardedSFTTrainer(ShardedTrainerMixin, SFTTrainer): ...
    trainer = ShardedSFTTrainer(model=model, args=args, ..., stage=3)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import shardproof
from shardproof.integrations.readback import check_saved

if TYPE_CHECKING:
    from transformers import Trainer as Base

    from shardproof import MixedPrecision
else:
    Base = object


class ShardedTrainerMixin(Base):
    """Shards the model when the optimizer is made, and leaves it its own class: there is nothing to unwrap.

    Put it in front of the trainer's class. `stage` and `mixed_precision` are those of `shardproof.shard`.
    The trainer believes in an ordinary model on each rank, so it must not be told of DeepSpeed or FSDP.
    """

    def __init__(
        self, *args: Any, stage: int = 3, mixed_precision: MixedPrecision | None = None, **kwargs: Any
    ) -> None:
        self.shard_stage = stage
        self.shard_precision = mixed_precision
        self._sharded = False
        super().__init__(*args, **kwargs)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """A model that is to be sharded stays where it is: `shard` moves a slice of it at a time."""
        if model is not getattr(self, "model", model):
            super()._move_model_to_device(model, device)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Shard, then make the optimizer: its parameters are the slices from the start."""
        self._shard()
        return super().create_optimizer(model) if model is not None else super().create_optimizer()

    def _shard(self) -> None:
        if self._sharded:
            return
        self._saved_names = saved_names(self.model)
        shardproof.shard(
            self.model,
            self.shard_stage,
            mixed_precision=self.shard_precision,
            device=self.args.device,
        )
        self.model._is_accelerate_prepared = True  # accelerate then neither wraps nor moves it
        self._sharded = True

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One micro-batch. Stages 0 and 1 reduce gradients at the last one of a step; stages 2 and 3 at each, for
        between micro-batches they promise to hold a slice of the gradients, not the whole of them."""
        reduce = self.accelerator.sync_gradients or self.shard_stage >= 2
        with contextlib.nullcontext() if reduce else shardproof.no_sync(self.model):
            return super().training_step(model, *args, **kwargs)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return shardproof.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None:
            grad_norm = shardproof.clip_grad_norm_(self.model.parameters(), float("inf"))
        return grad_norm

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Gather on rank 0 what is saved, of a PEFT model the adapters, and write it as `save_pretrained` does. Every
        rank must call it."""
        if not self._sharded:
            super().save_model(output_dir, _internal_call)
            return
        with state_dict_of(self.model, self._saved_names):
            weights = shardproof.full_state_dict(self.model, rank0_only=not adapters_of(self.model))
        if self.args.should_save:
            self._save(output_dir, state_dict=weights)
            ignored = getattr(self.model, "_keys_to_ignore_on_save", None) or ()
            check_saved(output_dir or self.args.output_dir, as_saved(self.model, weights), ignored)
        else:
            pick_adapters(self.model, weights)  # PEFT asks modules for their state, which they gather: on all ranks
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


def adapters_of(model: nn.Module) -> list[str]:
    """The names of a PEFT model's adapters; none of any other model."""
    return list(getattr(model, "peft_config", {}))


def as_saved(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """These weights under the names that `save_pretrained` gives them: PEFT leaves the adapter's name out."""
    first = next(iter(adapters_of(model)), None)
    return {
        name if first is None else name.replace(f".modules_to_save.{first}.", ".").replace(f".{first}.", "."): value
        for name, value in weights.items()
        if isinstance(value, torch.Tensor)
    }


def pick_adapters(model: nn.Module, weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What PEFT saves of these weights."""
    if not adapters_of(model):
        return []
    from peft import get_peft_model_state_dict

    picked = [get_peft_model_state_dict(model, weights, adapter_name=name) for name in adapters_of(model)]
    return [value for adapter in picked for value in adapter.values()]


def saved_names(model: nn.Module) -> set[str]:
    """The entries of the state dict that `save_pretrained` writes: of a PEFT model, what PEFT picks from stand-ins."""
    names = set(model.state_dict(keep_vars=True))
    if not adapters_of(model):
        return names
    stand_ins = {name: torch.empty(0, device="meta") for name in names}
    name_of = {id(stand_in): name for name, stand_in in stand_ins.items()}
    picked = {name_of.get(id(value), "") for value in pick_adapters(model, stand_ins)}
    # A tuner that makes new tensors of the weights may need any of them.
    return picked if picked <= names else names


@contextlib.contextmanager
def state_dict_of(model: nn.Module, names: set[str]) -> Iterator[None]:
    """Inside, the state dict of `model` has these entries only, so that nothing else is gathered."""

    def drop(module: nn.Module, entries: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in [name for name in entries if name.removeprefix(prefix) not in names]:
            del entries[name]

    hook = model.register_state_dict_post_hook(drop)
    try:
        yield
    finally:
        hook.remove()
