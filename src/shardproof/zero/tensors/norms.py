"""Norms of sharded tensors: computed on slices, summed with one all-reduce."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardproof.zero.tensors.parameter import ShardedGradient, ShardedParameter, ShardedTensor, by_engine, in_the_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardproof.zero.schedule.engine import Engine
    from shardproof.zero.units.flat import Flat

    Places = list[tuple[Flat, int]]  # of which flat, of which parameter in it


def norms_of(tensors: Iterable[ShardedTensor], order: float = 2.0, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The true norms of sharded tensors, in one collective per engine.

    Returns: [n], the norm of each tensor over all its elements, float32 at least.
    """
    tensors = list(tensors)
    at = sorted(
        range(len(tensors)), key=lambda i: in_the_model(tensors[i])
    )  # other ranks may list them in another order
    found = [
        _over_ranks(engine, [(t.flat, t.index) for t in members], [t.local.detach() for t in members], order, dtype)
        for engine, members in by_engine(tensors[i] for i in at).items()
    ]
    if not found:
        return torch.zeros(0)
    norms = found[0] if len(found) == 1 else torch.cat(found)
    return norms if at == list(range(len(at))) else norms[torch.tensor(at, device=norms.device).argsort()]


def _over_ranks(
    engine: Engine, places: Places, parts: list[torch.Tensor], order: float, dtype: torch.dtype | None
) -> torch.Tensor:
    """The norms of whole tensors, given this rank's slices `parts`."""
    if engine.deterministic:  # an order of additions that does not depend on where slices begin
        wholes = (engine.gradients.gather_slices(*place, part) for place, part in zip(places, parts, strict=True))
        found = [_local_norms([whole], order, dtype)[0] for whole in wholes]
    else:
        found = _local_norms(parts, order, dtype)
    if len({norm.device for norm in found}) == 1:
        norms = torch.stack(found).to(engine.comm.device)  # at once: with offload the host waits for each copy
    else:
        norms = torch.stack([norm.to(engine.comm.device) for norm in found])
    if engine.sharded and not engine.deterministic:
        first, index = places[0]
        engine.meet("compute norms", (first.index, index))
        if order == float("inf"):
            found, nan = engine.comm.largest(torch.stack([norms, norms.isnan().to(norms.dtype)]))  # gloo may lose NaN
            norms = found.masked_fill(nan > 0, torch.nan)
        elif order == 0:
            engine.comm.total(norms, of_shards=True)
        else:
            norms = engine.comm.total(norms.pow_(order), of_shards=True).pow_(1.0 / order)
    return norms


def _local_norms(parts: list[torch.Tensor], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """In one operation for all that are of one dtype and device."""
    norms: list[Any] = [None] * len(parts)
    alike: dict[Any, list[int]] = {}
    wider = {  # of complex elements, whose norm is real
        part: torch.promote_types(part, dtype or torch.float32) for part in {part.dtype for part in parts}
    }
    for i, part in enumerate(parts):
        wide = wider[part.dtype]
        if part.numel() == 0:
            norms[i] = torch.zeros((), dtype=wide.to_real(), device=part.device)
        else:
            alike.setdefault((part.dtype, part.device, wide), []).append(i)
    for (_, _, wide), members in alike.items():
        for i, norm in zip(members, torch._foreach_norm([parts[i] for i in members], order, wide), strict=True):
            norms[i] = norm
    return norms


def learning_parameters(model: nn.Module) -> list[torch.Tensor]:
    """The parameters of a model that have a gradient, or may get one. For a sharded model the units know them, unless
    modules or parameters have been exchanged: walking all modules of a model with adapters takes the host some
    milliseconds."""
    engine: Engine | None = getattr(model, "_orig_mod", model).__dict__.get("_shardproof")
    if engine is None or engine.builder.altered:
        return list(model.parameters())
    flats = [flat for flat in engine.flats if flat.grad is not None or any(flat.requires_grad)]
    return [p for flat in flats for p in flat.params]


class GradientGroup:
    """The present gradients of parameters of one engine, read and scaled together: a Python loop over them would be
    most of the host's cost of clipping.

    Attributes:
        present: flat and index of each, in the same order on all ranks.
        parts: this rank's slices of them.
    """

    def __init__(self, engine: Engine, present: Places) -> None:
        self.engine, self.present = engine, present
        engine.copies.take_in_gradients()
        if engine.home is not None:
            engine.home.settle()
        self.parts = [flat.grad_locals[index] for flat, index in present]

    @classmethod
    def of(cls, params: Sequence[torch.Tensor]) -> GradientGroup | None:
        """None if each has to be treated separately: parameters that are not sharded, or belong to several engines;
        gradients that lie in several places or are part of a graph."""
        sharded: list[ShardedParameter] = [p for p in params if type(p) is ShardedParameter]
        engine = sharded[0].flat.engine if sharded else None
        if engine is None:
            return None
        places: dict[tuple[int, int], Flat] = {
            (p.flat.index, p.index): p.flat for p in sharded if p.flat.engine is engine
        }
        if len(places) < len(params):  # there are others, or some of them twice
            return None
        engine.gradients.look(places)
        present = [(places[at], at[1]) for at in sorted(places) if places[at].has_grad[at[1]]]
        buffers = [(flat.grad, flat.device) for flat in dict.fromkeys(flat for flat, _ in present)]
        alike = len({(buffer.dtype, device) for buffer, device in buffers if buffer is not None}) == 1
        if not alike or any(buffer is None or buffer.requires_grad for buffer, _ in buffers):
            engine.gradients.swept.clear()  # who looks at each now begins with what all ranks have just met for
            engine.gradients.updated = True
            return None
        return cls(engine, present)

    def norm(self, order: float) -> torch.Tensor:
        """As `torch.nn.utils.get_total_norm`."""
        norms = _over_ranks(self.engine, self.present, self.parts, order, None)
        return torch.linalg.vector_norm(norms.to(self.parts[0].dtype.to_real()), order)

    def scale(self, max_norm: float, total: torch.Tensor) -> None:
        """As `torch.nn.utils.clip_grads_with_norm_`."""
        factor = torch.clamp(max_norm / (total.to(self.present[0][0].device) + 1e-6), max=1.0)
        with torch.no_grad():
            torch._foreach_mul_(self.parts, factor)
        for flat in dict.fromkeys(flat for flat, _ in self.present):
            flat.gradient_changed()
        first, index = self.present[0]
        self.engine.written.note((True, first.index, index), "_foreach_mul_", [factor])


def norm_of(tensor: Any = None, ord: Any = 2, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.norm`, `torch.norm` and `torch.linalg.vector_norm` if they follow from slices, otherwise
    NotImplemented."""
    if tensor is None:  # given by its name, of which there are several
        return NotImplemented
    order = kwargs.pop("p", ord)
    order = 2.0 if order in (None, "fro") else order
    plain = dim is None and not args and not any(v for k, v in kwargs.items() if k != "dtype")
    differentiable = torch.is_grad_enabled() and (
        tensor.flat.requires_grad[tensor.index]
        if isinstance(tensor, ShardedParameter)
        else isinstance(tensor, ShardedGradient) and tensor.flat.in_graph(tensor.buffer, tensor.index)
    )
    if not plain or differentiable or not isinstance(order, (int, float)) or order < 0:
        return NotImplemented
    if isinstance(tensor, ShardedGradient):
        out = tensor.flat.engine.gradients.norm(tensor, float(order), kwargs.get("dtype"))
    else:
        out = norms_of([tensor], float(order), kwargs.get("dtype"))[0]
    return out.clone() if kwargs.get("dtype") else out.to(tensor.dtype.to_real(), copy=True)


def linalg_norm(tensor: Any = None, ord: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`torch.linalg.norm`: of a matrix norm, only the Frobenius norm is that of its elements."""
    by_elements = ord in (None, "fro") or (tensor is not None and tensor.dim() == 1)
    return norm_of(tensor, ord, *args, **kwargs) if by_elements else NotImplemented


def foreach_norm(tensors: Any, ord: float = 2, dtype: torch.dtype | None = None) -> Any:
    """`torch._foreach_norm`, in one collective for all."""
    if ord < 0 or not all(isinstance(t, ShardedTensor) for t in tensors):
        return [torch.linalg.vector_norm(t, ord, dtype=dtype) for t in tensors]
    norms = norms_of(tensors, float(ord), dtype).unbind()
    with torch._C.DisableTorchFunctionSubclass():  # only their dtypes are asked for
        return [norm if dtype else norm.to(t.dtype.to_real()) for t, norm in zip(tensors, norms, strict=True)]
