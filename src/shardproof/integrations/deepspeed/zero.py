"""deepspeed.zero: building a model, access to whole parameters, and calls that are not needed here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardproof.errors import EngineError
from shardproof.integrations.deepspeed.comm import init_distributed
from shardproof.zero.device import default_device
from shardproof.zero.ranks.consensus import BARRIER
from shardproof.zero.ranks.invariants import digest, some
from shardproof.zero.tensors.parameter import ShardedParameter, by_engine


class Init(contextlib.AbstractContextManager["Init"]):
    """A context to build a model in. The model is built unsharded, in host memory; `initialize` shards it.

    So a model must fit into host memory once per rank, which `deepspeed.zero.Init` does not require. All arguments are
    accepted and none is needed: device, precision and stage come from the configuration given to `initialize`.
    """

    def __init__(self, module: nn.Module | None = None, *args: Any, enabled: bool = True, **kwargs: Any) -> None:
        self.enabled = enabled
        if enabled:
            init_distributed()

    def __exit__(self, *error: Any) -> None:
        pass


class GatheredParameters(contextlib.AbstractContextManager[None]):
    """Inside, `params` are ordinary whole parameters, the same objects. Every rank must enter and leave it.

    Works before `initialize`, too. At every stage all ranks continue with the edits of `modifier_rank`.

    Args:
        params: one parameter, or any iterable of them.
        modifier_rank: the rank whose edits are kept. None: no edits.
        fwd_module: accepted but not needed.
        enabled: False does nothing.

    Raises:
        EngineError: on leaving, if a parameter was edited although `modifier_rank` is None, or changed its shape.
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
        self._inside: list[tuple[Any, nn.Parameter, int]] = []

    def __enter__(self) -> None:
        sharded = [p for p in self.params if isinstance(p, ShardedParameter)]
        with torch.no_grad():
            whole = [p.whole().detach().clone() for p in sharded]
        try:
            for p, value in zip(sharded, whole, strict=True):
                # `p`, the object that others hold, becomes the plain one, and `other` the sharded one.
                other = nn.Parameter(value, requires_grad=p.requires_grad)
                _swap(p, other)
                self._inside.append((p, other, digest(value) if self.modifier_rank is None else 0))
        except BaseException:
            self._swap_back()
            raise

    def _swap_back(self) -> list[tuple[Any, nn.Parameter, int]]:
        inside, self._inside = self._inside, []
        for p, other, _ in inside:
            _swap(p, other)
        return inside

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        values = [p.data for p, _, _ in self._inside]
        inside = self._swap_back()
        if kind is not None:
            return
        pairs = [(p, value, was) for (p, _, was), value in zip(inside, values, strict=True)]
        shapes = [p.qualified_name for p, value, _ in pairs if value.shape != p.shape]
        if shapes:
            raise EngineError(f"{some(shapes)} has changed its shape. Change shapes before initialize.")
        if self.modifier_rank is None:
            edited = [p.qualified_name for p, value, was in pairs if digest(value) != was]
            if edited:
                raise EngineError(
                    f"{some(edited)} was edited inside GatheredParameters, and the edit is dropped. Pass "
                    "modifier_rank=0 to keep rank 0's edits."
                )
            return
        for engine in by_engine(p for p, _, _ in pairs):
            engine.meet(BARRIER)  # a rank that sends cannot lend its slices to one that still computes
        for p, value, _ in pairs:
            _keep(p, _send(value.contiguous(), self.modifier_rank))
        for p in self.params:
            if not isinstance(p, ShardedParameter):
                _send(p.data, self.modifier_rank)


def _swap(held: torch.Tensor, other: torch.Tensor) -> None:
    if isinstance(held, ShardedParameter):  # a reused graph node holds it
        held.flat.standing.show_anew()
    try:
        torch.utils.swap_tensors(held, other)
    except RuntimeError as error:
        raise EngineError(
            f"GatheredParameters cannot make a parameter whole while a graph or a weak reference holds it ({error}). "
            "Enter it between steps, or use `with shardproof.whole(model):`."
        ) from None


def _keep(p: ShardedParameter, value: torch.Tensor) -> None:
    """Each rank takes over its slice of `value` where it differs; elsewhere the float32 master, which is finer,
    stays."""
    with torch.no_grad():
        p.before_change()
        p.flat.take_over(p.index, value)
        p.value_changed()


def _send(value: torch.Tensor, source: int) -> torch.Tensor:
    """Overwrite `value` with that of rank `source`."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        there = value.to(default_device())  # the backend sends from there; the model may still be on the host
        dist.broadcast(there, source)
        if there is not value:
            value.copy_(there)
    return value


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do: a parameter may be used by any module. Checks its arguments, as DeepSpeed does."""
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise EngineError("register_external_parameter takes a module and a parameter.")


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do."""


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """The model itself: it can generate without unwrapping."""
    yield getattr(model, "module", model)
