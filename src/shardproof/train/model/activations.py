"""What happens to activations between forward and backward: kept, recomputed, or offloaded to the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from shardproof.errors import ConfigError
from shardproof.models.checkpointing import checkpointing_name
from shardproof.zero.device import side_stream

HOST = torch.device("cpu")
SMALL = 4096
BEHIND = 4  # copies to the host that computation may run ahead of
AHEAD = 16  # tensors that may be copied back before they are needed
ENOUGH = 2**28  # bytes beyond which only the next tensor is prefetched: about 10 ms of PCIe
NEAR = 2 * AHEAD  # in numbers of saved tensors: an operation asks for what it saved in an order of its own

# Operations whose results are expensive to compute and cheap to keep. Batched products are not among them: in eager
# attention they produce the matrix of all pairs of tokens.
_PRODUCTS = ("mm", "addmm", "_scaled_mm", "_grouped_mm")
_KINDS = "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"
_ELSEWHERE = "flex_attention", "_varlen_attn"  # in other namespaces
_ATTENTION = tuple(f"_scaled_dot_product_{kind}" for kind in _KINDS)


def _keeps(operator: Any) -> bool:
    if operator.namespace == "aten":
        return operator._schema.name.removeprefix("aten::") in (*_PRODUCTS, *_ATTENTION)
    return "flash_attn" in operator.namespace or any(name in operator._schema.name for name in _ELSEWHERE)


def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the results of matrix products and attention; recompute the rest."""
    kept = isinstance(operator, torch._ops.OpOverload) and _keeps(operator)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def policy_of_biased_experts(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """`policy` for models in which transformers adds a bias in place to the result of the experts' grouped product
    (gpt-oss): kept tensors must not be written to."""
    if getattr(operator, "overloadpacket", None) is torch.ops.aten._grouped_mm:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return policy(context, operator, *args, **kwargs)


def choose_checkpointing(model: nn.Module, how: bool | int | str) -> nn.Module:
    """Make enabling checkpointing on this model follow --gradient-checkpointing, whoever enables it.

    Trainer enables it, and TRL's trainers turn it off and on again. Their arguments cannot express this, since they are
    serialised.

    Args:
        model: a transformers model, without adapters.
        how: "selective" keeps the results of matrix products and attention; a number n recomputes every n-th layer.

    Returns: `model`.

    Raises:
        ConfigError: when enabled, if the model does not support it, or has no layers to choose from.
    """
    from shardproof.train.options.config import SELECTIVE  # with pydantic, which who holds activations needs not have

    every, name = 1 if isinstance(how, (bool, str)) else how, checkpointing_name(model)
    if not getattr(model, "supports_gradient_checkpointing", True):
        setattr(model, f"{name}_enable", partial(_refuse, type(model).__name__))
        return model
    if how != SELECTIVE and every < 2:
        return model
    plain: Any = getattr(model, f"{name}_enable")

    def enable(
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        chosen = dict(gradient_checkpointing_kwargs or activation_checkpointing_kwargs or {})
        if how == SELECTIVE:
            biased = any(getattr(module, "has_bias", False) for module in model.modules())
            keeps = policy_of_biased_experts if biased else policy
            chosen |= {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, keeps)}
        plain(**{f"{name}_kwargs": chosen}, **more)
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if every > 1 and not layers:
            raise ConfigError(
                f"--gradient-checkpointing {every}: the layers of {type(model).__name__} cannot be identified. Use"
                f" yes, selective or no."
            )
        for number, layer in enumerate(layers if every > 1 else ()):
            layer.gradient_checkpointing = number % every == 0

    setattr(model, f"{name}_enable", enable)  # on this object only
    return model


def _refuse(kind: str, *args: Any, **options: Any) -> None:
    raise ConfigError(f"--gradient-checkpointing: a {kind} cannot recompute its activations. Leave it out.")


class Held:
    """A tensor held by the host.

    Attributes:
        number: how many tensors were saved before it.
        host: its copy on the host.
        saved: how many operations saved it.
        here: the tensor on the device, while it is being copied to the host (`leaving`) or back, with its `version`.
            The `event` marks the end of that copy.
    """

    def __init__(self, number: int, host: torch.Tensor) -> None:
        self.number, self.host, self.saved = number, host, 0
        self._backward, self._asked = -1, 0
        self.here: torch.Tensor | None = None
        self.event: torch.Event | None = None
        self.version, self.leaving = 0, False

    def set(self, here: torch.Tensor, event: torch.Event | None, leaving: bool) -> None:
        self.here, self.event, self.leaving, self.version = here, event, leaving, here._version

    def ask(self, backward: int) -> bool:
        """Returns whether this backward pass has asked for it before."""
        again = self._backward == backward
        self._backward, self._asked = backward, self._asked + 1 if again else 1
        return again

    def awaited(self, backward: int) -> bool:
        """Whether an operation that saved it has not asked for it yet."""
        return self._backward != backward or self._asked < self.saved


class HeldByHost(saved_tensors_hooks):
    """A context in which tensors that a forward pass saves for backward go to host memory, and come back before they
    are needed.

    Copies run in a side stream. A few copies to the host may lag behind, and a tensor that is still on the device when
    it is needed is used as it is. Backward asks for saved tensors in roughly reverse order, so with each one it asks
    for, the copies of the next ones are queued before it computes. That is a guess: tensors requested in another order
    are copied on request.

    Tensors that come back lie in memory of the copy stream, which waits for computation before it copies anything. They
    can therefore be released at any time, whether they were used or have not even arrived. Use one object for many
    forward passes: torch keeps memory for each stream.

    Tensors that lie in gathered weights stay where they are: the engine's own hooks, inside these, keep only their
    place. A tensor that is saved several times is copied once.

    Args:
        device: where the model computes.
        host: where activations are held.
        smallest: bytes; smaller tensors are not worth a copy.

    Attributes:
        queues: whether copies are queued.
    """

    def __init__(self, device: torch.device, host: torch.device = HOST, smallest: int = SMALL) -> None:
        self.device, self.host, self.smallest = device, host, smallest
        self.queues = device.type not in ("cpu", "meta")
        self._numbers = count()
        self._saved: WeakValueDictionary[int, Held] = WeakValueDictionary()  # by number
        self._held: dict[tuple[Any, ...], Held] = {}  # in this forward pass
        self._here: list[Held] = []  # those with a copy on the device
        self._stream: torch.Stream | None = None
        self._backward = -1
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        small = tensor.numel() * tensor.element_size() < self.smallest
        if small or tensor.device.type != self.device.type or tensor.is_sparse or isinstance(tensor, nn.Parameter):
            return tensor
        # While the weak reference exists, no other memory can have the same key.
        memory = StorageWeakRef(tensor.untyped_storage())
        where = tensor.storage_offset(), tensor.shape, tensor.stride()
        key = memory, *where, tensor.dtype, tensor.is_conj(), tensor.is_neg(), tensor._version
        if key not in self._held:
            self._held[key] = self._copy_away(tensor.detach())
        held = self._held[key]
        held.saved += 1
        return held

    def _copy_away(self, values: torch.Tensor) -> Held:
        # Keeps the memory order: the product of a transposed matrix rounds differently from that of a row-major copy.
        host = self._room(values)
        if host.stride() != values.stride():  # gaps or expanded elements: a single transfer needs a dense tensor
            values = values.clone()
        held = Held(next(self._numbers), host)
        with self._beside():
            host.copy_(values, non_blocking=True)
            held.set(values, self._event(), leaving=True)
        self._saved[held.number] = held
        self._here.append(held)
        while len(self._here) > BEHIND:
            self._let_go(self._here.pop(0))
        return held

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        backward = torch._C._current_graph_task_id()
        if backward not in (-1, self._backward):
            torch.autograd.Variable._execution_engine.queue_callback(self._forget)  # type: ignore[attr-defined]
            self._backward = backward
        self._have([packed, *(self._expected(packed, backward) if backward != -1 else [])])
        here: torch.Tensor = packed.here
        if not packed.leaving:
            self._wait(packed)
        if backward == -1:  # somebody inspects saved tensors
            self._forget()
        return here

    def _expected(self, held: Held, backward: int) -> list[Held]:
        """The tensors likely to be needed next: nearby ones already on the device, then those saved before this one."""
        again = held.ask(backward)  # a tensor saved by many operations does not tell how far backward has got
        others = [h for h in self._here if h is not held and h.awaited(backward)]
        if again:
            return others[:AHEAD]
        found = [h for h in others if abs(h.number - held.number) <= NEAR]
        first = min(h.number for h in (held, *found))
        for number in range(first - 1, first - 1 - NEAR, -1):
            if len(found) >= AHEAD or sum(h.host.nbytes for h in found) >= ENOUGH:
                break
            before = self._saved.get(number)
            if before is not None and before.awaited(backward):
                found.append(before)
        return found

    def _have(self, wanted: list[Held]) -> None:
        """Have these on the device, and no others."""
        for held in self._here:
            edited = held.here is not None and held.here._version != held.version
            if edited or held not in wanted:
                self._let_go(held)
        self._here = wanted
        missing = [held for held in wanted if held.here is None]
        if missing:
            with self._beside():
                for held in missing:
                    held.set(self._copy_back(held.host), self._event(), leaving=False)

    def _let_go(self, held: Held) -> None:
        if held.leaving:  # its memory is free once computation has waited for the copy
            self._wait(held)
        held.here = held.event = None

    def _forget(self) -> None:
        self._have([])

    def _room(self, values: torch.Tensor) -> torch.Tensor:
        """Host memory for a copy."""
        return torch.empty_like(values, device=self.host, pin_memory=self.queues)

    def _copy_back(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self.device, non_blocking=True)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        if not self.queues:
            yield
            return
        with side_stream(self.device, self._stream) as self._stream:
            yield

    def _event(self) -> torch.Event | None:
        return None if self._stream is None else self._stream.record_event()

    def _wait(self, held: Held) -> None:
        if held.event is not None:
            torch.accelerator.current_stream(self.device).wait_event(held.event)

    def __exit__(self, *args: Any) -> None:
        self._held = {}
        super().__exit__(*args)
