"""What would do the engine's work a second time, or in its place: it is refused where it is found."""

from __future__ import annotations

from torch import nn

from shardproof.errors import EngineError

# By name, as importing them takes half a second.
_WRAPPERS = {
    "DDP",  # what `replicate` mixes into a module's class
    "DataParallel",
    "DistributedDataParallel",
    "FSDPModule",
    "FullyShardedDataParallel",
    "ReplicateModule",
}


def check_unwrapped(model: nn.Module) -> None:
    """Refuse what averages gradients, cuts parameters or splits batches itself."""
    for name, module in model.named_modules():
        if _WRAPPERS & {cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("torch.")}:
            where = f"'{name}'" if name else "The model"
            raise EngineError(
                f"{where} is wrapped in {type(module).__name__}, which does what shardproof.shard does. Leave the "
                "wrapper out: shard the module itself, stage 0 is what DistributedDataParallel does."
            )


def check_steps(model: nn.Module) -> None:
    """Refuse optimizers that step in backward where gradients of plain parameters are accumulated."""
    for name, p in model.named_parameters():
        if "_in_backward_optimizers" in p.__dict__:
            raise EngineError(
                f"'{name}' has an optimizer of _apply_optimizer_in_backward, which would never step: it waits for what "
                "accumulates the gradient of a plain parameter. Step in a hook behind shardproof.shard instead: "
                "p.register_post_accumulate_grad_hook."
            )
