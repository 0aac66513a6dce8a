"""deepspeed.zero: building a model, looking at whole parameters, and what need not be said here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardproof.errors import EngineError
from shardproof.integrations.deepspeed.comm import init_distributed
from shardproof.zero.parameter import ShardedParameter


class Init(contextlib.AbstractContextManager["Init"]):
    """A context to build a model in. The model is built whole, in the memory of the host; `initialize` cuts it.

    So a model must fit into the memory of the host once for each rank, which `deepspeed.zero.Init` does not ask.
    All arguments are taken and none is needed: device, precision and stage come from the configuration that
    `initialize` gets.
    """

    def __init__(self, module: nn.Module | None = None, *args: Any, enabled: bool = True, **kwargs: Any) -> None:
        self.enabled = enabled
        if enabled:
            init_distributed()

    def __exit__(self, *error: Any) -> None:
        pass


class GatheredParameters(contextlib.AbstractContextManager[None]):
    """Inside, `params` are ordinary whole parameters, the same objects. Every rank must enter and leave it.

    Works before `initialize`, too. At every stage the edits of `modifier_rank` are what all ranks go on with.

    Args:
        params: one parameter, or any iterable of them.
        modifier_rank: the rank whose edits are kept. None: nothing is to be edited.
        fwd_module: taken and not needed.
        enabled: False does nothing.

    Raises:
        EngineError: on leaving, if a parameter was edited and `modifier_rank` is None, or has another shape.
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        unique = {id(p): p for p in given if isinstance(p, torch.Tensor)}
        self.params = list(unique.values()) if enabled else []
        self.modifier_rank = modifier_rank
        self._inside: list[tuple[torch.Tensor, ShardedParameter, torch.Tensor]] = []

    def __enter__(self) -> None:
        sharded = [p for p in self.params if isinstance(p, ShardedParameter)]
        with torch.no_grad():
            whole = [p.whole().detach().clone() for p in sharded]
        for p, value in zip(sharded, whole, strict=True):
            other = nn.Parameter(value, requires_grad=p.requires_grad)
            original = value.clone()
            _swap(p, other)  # `p`, the object that everybody holds, is the plain one now, `other` the sharded one
            self._inside.append((p, other, original))  # type: ignore[arg-type]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        edits = [(p.data, original) for p, _, original in self._inside]
        for p, sharded, _ in self._inside:
            _swap(p, sharded)
        inside, self._inside = [p for p, _, _ in self._inside], []
        if kind is not None:
            return
        if self.modifier_rank is None:
            _refuse_edits(inside, edits)
            return
        for p, (value, original) in zip(inside, edits, strict=True):
            _keep(p, value, original, self.modifier_rank)  # type: ignore[arg-type]
        if dist.is_initialized():
            for p in self.params:
                if not isinstance(p, ShardedParameter):
                    _send(p.data, self.modifier_rank)


def _swap(held: torch.Tensor, other: torch.Tensor) -> None:
    try:
        torch.utils.swap_tensors(held, other)
    except RuntimeError as error:
        raise EngineError(
            f"GatheredParameters cannot make a parameter whole while a graph or a weak reference holds it ({error}). "
            "Enter it between steps, or use `with shardproof.whole(model):`."
        ) from None


def _refuse_edits(params: list[torch.Tensor], edits: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    names = [
        p.qualified_name  # type: ignore[attr-defined]
        for p, (value, original) in zip(params, edits, strict=True)
        if value.shape != original.shape or not torch.equal(value, original)
    ]
    if names:
        raise EngineError(
            f"{', '.join(names[:3])} was edited inside GatheredParameters, and the edit is dropped. Pass "
            "modifier_rank=0 to keep what rank 0 wrote."
        )


def _keep(p: ShardedParameter, value: torch.Tensor, original: torch.Tensor, source: int) -> None:
    """Each rank keeps its slice of what `source` has, where it differs: the rest of a float32 master is finer."""
    if value.shape != original.shape:
        raise EngineError(
            f"'{p.qualified_name}' has shape {tuple(original.shape)} and was given {tuple(value.shape)}. Change shapes "
            "before initialize."
        )
    value = _send(value.contiguous(), source)
    first, last = p.flat.range_in_parameter(p.index)
    with torch.no_grad():
        p.before_change()
        new, old = value.reshape(-1)[first:last], original.reshape(-1)[first:last]
        master, differs = p.local.view(-1), new != old
        master[differs] = new[differs].to(master.dtype)
        p.value_changed()


def _send(value: torch.Tensor, source: int) -> torch.Tensor:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(value, source)
    return value


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do: a parameter may be used by any module. Checks its arguments, as DeepSpeed does."""
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise EngineError("register_external_parameter takes a module and a parameter.")


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do."""


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """The model itself: it generates as it is."""
    yield getattr(model, "module", model)
