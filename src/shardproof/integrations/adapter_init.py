"""Initialising adapters from the weights (PiSSA, OLoRA) of a model that is still to be sharded.

[Note: initialised where nothing is whole]
PEFT decomposes a weight, puts its principal part into the adapter and subtracts that part from the weight. Here weights
have not been read yet. So each rank reads one weight at a time and has PEFT decompose it, the two small matrices are
sent to the other ranks, and the weight gets a reader that subtracts their product when it is read. So any number of
ranks get what one process computes, and a resumed run needs only the two matrices, not a decomposition that gives the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardproof.errors import ConfigError
from shardproof.zero.build import READER
from shardproof.zero.device import default_device


@dataclass(frozen=True)
class Less:
    """Reads a range of a weight minus the initial product of its adapter.

    Attributes:
        read: reads a range of the weight from the files.
        second, first: the adapter's matrices B and A.
        transposed: whether the weight is stored as [in, out].
    """

    read: Callable[[int, int], torch.Tensor]
    shape: torch.Size
    dtype: torch.dtype
    second: torch.Tensor
    first: torch.Tensor
    scaling: float
    transposed: bool

    def __call__(self, first: int, last: int) -> torch.Tensor:
        """Computes the full product for any range, so that all ranges have the same bits."""
        whole = self.read(0, self.shape.numel()).view(self.shape).to(self.dtype)
        return self.of(whole).reshape(-1)[first:last]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        begun = self.scaling * self.second.float() @ self.first.float()
        return (whole.float() - (begun.T if self.transposed else begun)).to(self.dtype)


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The linear layers of a PEFT model that have adapters, by name."""
    from peft.tuners.lora import Linear

    return ((name, module) for name, module in model.named_modules() if isinstance(module, Linear))


def begin_as(
    model: nn.Module, kind: str, seed: int, known: Callable[[], Mapping[str, torch.Tensor]] | None = None
) -> dict[str, torch.Tensor]:
    """Initialise the adapters of a PEFT model by the method `kind`, and subtract their initial products from its
    weights. All ranks call it, before the model is sharded.

    Args:
        kind: PEFT's name of the method: `pissa`, `pissa_niter_4`, `olora`.
        seed: the random seed for `pissa_niter_N`.
        known: the initial adapters of an earlier run, on rank 0, to use instead.

    Returns: their initial values, under PEFT's names for saved adapters. Not a copy.

    Raises:
        ConfigError: a weight cannot be decomposed, or `known` belongs to another model.
    """
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    ranks, here = (dist.get_world_size(), dist.get_rank()) if several else (1, 0)
    there = known() if known is not None and here == 0 else {}
    begun: dict[str, torch.Tensor] = {}
    layers = list(adapted_layers(model))
    for at in range(0, len(layers), ranks):  # each rank decomposes one layer of every `ranks`
        group = layers[at : at + ranks]
        found: list[Any] = [None] * ranks
        if known is not None:
            found = [_known(there, *each) for each in group] if here == 0 else found[: len(group)]
            if several:
                dist.broadcast_object_list(found)
        else:
            mine = _begun(*group[here], kind, seed + at + here) if here < len(group) else None
            if several:
                dist.all_gather_object(found, mine)
            else:
                found = [mine]
        if wrong := next((each for each in found if isinstance(each, str)), None):
            raise ConfigError(wrong)
        for (name, layer), values in zip(group, found, strict=False):
            begun |= dict(zip(_names(name), _put(layer, *values), strict=True))
        del found[:], values  # otherwise they occupy freed memory, in which the next weights no longer fit
    return begun


def _names(layer: str) -> tuple[str, str]:
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def _known(there: Mapping[str, torch.Tensor], name: str, layer: Any) -> Any:
    """The initial adapter of a layer from the file, or an error text."""
    (adapter,) = layer.active_adapters
    for own, place in zip(_names(name), (layer.lora_A, layer.lora_B), strict=True):
        if own not in there:
            return f"{own} is not in the file of initial adapters, which belongs to another model."
        shape, needed = tuple(there[own].shape), tuple(place[adapter].weight.shape)
        if shape != needed:
            return f"{own} has shape {shape} in the file of initial adapters, but {needed} in the model."
    return [there[own] for own in _names(name)]


def _begun(name: str, layer: Any, kind: str, seed: int) -> Any:
    """The initial adapter of a layer, or an error text."""
    try:
        return _decomposed(layer, kind, seed)
    except RuntimeError as error:
        return f"{name}: its adapter cannot be initialised by {kind}: {str(error).strip()}."


def _decomposed(layer: Any, kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """PEFT's decomposition of the weight of a layer, which is left unchanged."""
    base, (adapter,) = layer.get_base_layer(), layer.active_adapters
    own, places = base._parameters["weight"], (layer.lora_A[adapter], layer.lora_B[adapter])
    device = default_device()
    whole = own.detach().clone() if (read := own.__dict__.get(READER)) is None else read(0, own.numel()).view(own.shape)
    base._parameters["weight"] = nn.Parameter(whole.to(device, own.dtype), requires_grad=False)
    before = [place.weight.data for place in places]
    try:
        if not bool(whole.isfinite().all()):
            raise RuntimeError("the weight is not finite")
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
            torch.manual_seed(seed)
            if kind == "olora":
                layer.olora_init(adapter)
            else:
                layer.pissa_init(adapter, kind)
        first, second = (place.weight.data.to("cpu", torch.float32).clone() for place in places)
    finally:
        base._parameters["weight"] = own
        for place, value in zip(places, before, strict=True):
            place.weight.data = value
    return first, second


def _put(layer: Any, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Set the initial adapter of a layer, and give its weight a reader that subtracts it. Returns the adapter's
    matrices."""
    base, (adapter,) = layer.get_base_layer(), layer.active_adapters
    a, b = (place[adapter].weight.detach() for place in (layer.lora_A, layer.lora_B))
    with torch.no_grad():
        a.copy_(first)
        b.copy_(second)
        own = base._parameters["weight"]
        read = own.__dict__.get(READER)
        less = Less(
            read or (lambda at, end: own.detach().reshape(-1)[at:end]),
            own.shape,
            own.dtype,
            b,
            a,
            layer.scaling[adapter],
            layer.fan_in_fan_out,
        )
        if read is None:
            own.data = less.of(own.detach())
        else:
            setattr(own, READER, less)
    return a, b
