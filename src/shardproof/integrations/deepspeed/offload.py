"""What happens to a wish for offload, which the engine cannot fulfil yet.

[Note: why a wish and not an error]
Offload changes where state lies, not what is trained, and files that ask for it are often used for models that fit.
So a run goes on where the memory suffices, with one line that says what this rank will hold; where it cannot suffice,
the run is refused before it begins, not after a night of loading.
"""

from __future__ import annotations

import torch
from torch import nn

from shardproof.errors import ConfigError
from shardproof.integrations.deepspeed.config import say_once
from shardproof.zero.device import free_memory


def needed(model: nn.Module, stage: int, ranks: int, compute_bytes: int) -> int:
    """Bytes that a rank holds between steps with an optimizer like Adam: masters, gradients, two moments, and whole
    parameters where the stage keeps them."""
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    everything = sum(p.numel() for p in model.parameters())
    share = [1 if stage < first else ranks for first in (1, 2, 3)]
    state = 12 * trainable // share[0] + 4 * trainable // share[1]
    return state + compute_bytes * everything // share[2]


def consider(
    wishes: list[str], model: nn.Module, stage: int, ranks: int, compute_bytes: int, device: torch.device
) -> None:
    """Say what is not offloaded, or refuse.

    Raises:
        ConfigError: what would have been offloaded does not fit on the accelerator.
    """
    if not wishes:
        return
    names = " and ".join(f"zero_optimization.{name}" for name in wishes)
    if device.type == "cpu":
        say_once(f"DeepSpeed configuration: {names}: this run computes on the CPU, so all of it lies there already.")
        return
    bytes_needed, free = needed(model, stage, ranks, compute_bytes), free_memory(device, 1)
    text = f"about {bytes_needed / 2**30:.1f} GiB of parameters, gradients and optimizer state on {device}"
    if bytes_needed > free:
        raise ConfigError(
            f"The DeepSpeed configuration asks for {names}, which is not built yet. Without it each rank would hold "
            f"{text}, where {free / 2**30:.1f} GiB are free. Use more ranks, a higher stage, or LoRA; with "
            "'device': 'none' the run is tried all the same."
        )
    say_once(f"DeepSpeed configuration: {names} is not built yet; each rank holds {text}.")
