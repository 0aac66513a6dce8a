"""What becomes of activations between forward and backward: kept, computed again, or kept by the host meanwhile."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from shardproof.errors import ConfigError
from shardproof.zero.device import beside

HOST = torch.device("cpu")
SMALL = 4096
AHEAD = 4  # copies that may lag behind

# What is dear to compute and cheap to keep. Batched products are not among them: in eager attention they give the
# matrix of all pairs of tokens.
_PRODUCTS = ("mm", "addmm", "_scaled_mm", "_grouped_mm")
_KINDS = "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"
_ATTENTION = tuple(f"_scaled_dot_product_{kind}" for kind in _KINDS)


def _keeps(operator: Any) -> bool:
    if operator.namespace == "aten":
        return operator._schema.name.removeprefix("aten::") in (*_PRODUCTS, *_ATTENTION)
    return "flash_attn" in operator.namespace or "flex_attention" in operator._schema.name


def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what matrix products and attention give; compute the rest again."""
    kept = isinstance(operator, torch._ops.OpOverload) and _keeps(operator)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def choose_checkpointing(model: nn.Module, how: bool | int | str) -> nn.Module:
    """Have `model.gradient_checkpointing_enable`, whoever calls it, do what --gradient-checkpointing says.

    Trainer calls it, TRL's trainers turn it off and on again, and no argument of theirs could say this: they write
    their arguments down.

    Args:
        model: of transformers, without adapters.
        how: "selective" keeps what matrix products and attention give; a number n computes every n-th layer again.

    Returns: `model`.

    Raises:
        ConfigError: on enabling, if the model has no layers to choose from.
    """
    from shardproof.train.config import SELECTIVE  # with pydantic, which who holds activations needs not have

    every = 1 if isinstance(how, (bool, str)) else how
    if how != SELECTIVE and every < 2:
        return model
    plain: Any = model.gradient_checkpointing_enable

    def enable(gradient_checkpointing_kwargs: dict[str, Any] | None = None, **more: Any) -> None:
        chosen = dict(gradient_checkpointing_kwargs or {})
        if how == SELECTIVE:
            chosen |= {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, policy)}
        plain(gradient_checkpointing_kwargs=chosen, **more)
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if every > 1 and not layers:
            raise ConfigError(
                f"--gradient-checkpointing {every}: the layers of {type(model).__name__} cannot be told apart. Take"
                " yes, selective or no."
            )
        for number, layer in enumerate(layers if every > 1 else ()):
            layer.gradient_checkpointing = number % every == 0

    model.gradient_checkpointing_enable = enable  # type: ignore[assignment]  # a function of this one object
    return model


class HeldByHost(saved_tensors_hooks):
    """Inside, what a forward pass saves for backward goes to the host's memory, and comes back when it is asked for.

    Copies away run on a stream beside the computing, of which a few may lag behind; copies back run in its own. What
    lies in gathered weights stays where it is: the engine's own hooks, inside of these, keep only its place. A tensor
    that is saved several times is copied once.

    Args:
        device: where the model computes.
        host: where activations are held.
        smallest: bytes; what is smaller is not worth a copy.
    """

    def __init__(self, device: torch.device, host: torch.device = HOST, smallest: int = SMALL) -> None:
        self.device, self.host, self.smallest = device, host, smallest
        self._held: dict[tuple[Any, ...], torch.Tensor] = {}
        self._leaving: deque[tuple[torch.Event, torch.Tensor]] = deque()
        self._stream: torch.Stream | None = None
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        small = tensor.numel() * tensor.element_size() < self.smallest
        if small or tensor.device.type != self.device.type or tensor.is_sparse or isinstance(tensor, nn.Parameter):
            return tensor
        # As long as the weak reference is there, no other memory has its name.
        memory = StorageWeakRef(tensor.untyped_storage())
        key = (memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key not in self._held:
            self._held[key] = self._copy_away(tensor.detach())
        return (self._held[key],)

    def _copy_away(self, values: torch.Tensor) -> torch.Tensor:
        apart = self.device.type != "cpu"
        # In the order of its elements: a product of a transposed matrix rounds otherwise than that of its copy in rows.
        held = torch.empty_like(values, device=self.host, pin_memory=apart)
        if held.stride() != values.stride():  # gaps, or elements that stand for several: one transfer needs them dense
            values = values.clone()
        if not apart:
            return held.copy_(values)
        with beside(self.device, self._stream) as self._stream:
            held.copy_(values, non_blocking=True)
            self._leaving.append((self._stream.record_event(), values))
        while len(self._leaving) > AHEAD:  # their memory is free once the computing has waited for the copy
            torch.accelerator.current_stream(self.device).wait_event(self._leaving.popleft()[0])
        return held

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        if self._stream is not None:
            torch.accelerator.current_stream(self.device).wait_stream(self._stream)
            self._leaving.clear()
        return packed[0].to(self.device, non_blocking=True)

    def __exit__(self, *args: Any) -> None:
        self._held = {}
        super().__exit__(*args)
