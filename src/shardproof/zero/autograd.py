"""Gathering as an autograd function, and what saved tensors become.

[Note: why an autograd function]
Autograd itself guarantees that the backward of a gather runs after every consumer of that gather has
contributed. A block used twice is gathered twice and reduced twice, and since reduction is linear the
sum is right. There is no "ready" flag that could be set twice and nothing that must happen once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C import _autograd

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardproof.zero.parameter import ShardedParameter
    from shardproof.zero.schedule import Engine
    from shardproof.zero.unit import Flat


_FIRST = 2**64 - 1  # the sequence number of torch's own AccumulateGrad
_hooks_enabled: Callable[[], bool] = _autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


class Unshard(torch.autograd.Function):
    """A flat buffer's leaf (its shard) -> the whole parameters `indices`, as plain views of the gathered buffer.

    The backward hands the whole gradients of this rank to the engine and returns nothing to the leaf,
    except where `torch.autograd.grad` asks for it. The parameters are inputs so that the graph knows them
    (`loss.backward(inputs=[...])`); nothing is returned to them either.
    """

    @staticmethod
    def forward(
        ctx: Any, leaf: torch.Tensor, flat: Flat, indices: tuple[int, ...], *params: ShardedParameter
    ) -> tuple[torch.Tensor, ...]:
        ctx.flat, ctx.indices = flat, indices
        ctx.set_materialize_grads(False)
        # Autograd runs what was made last first. A gather is made before all that uses it, but its backward shall run
        # as soon as it can: its gradients are whole then, and their reduction may begin.
        ctx._set_sequence_nr(_FIRST)
        # .data: not views in autograd's eyes, so that an edit in place under no_grad is allowed and counted.
        whole = [flat.view(flat.gathered, i).data for i in indices]
        ctx.mark_non_differentiable(*(w for w, i in zip(whole, indices, strict=True) if not flat.requires_grad[i]))
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if ctx.flat.captured is None:  # loss.backward(inputs=[...]) asks for some gradients only
            wanted = (node is None or torch._C._will_engine_execute_node(node) for node, _ in ctx.next_functions[1:])
            grads = tuple(grad if want else None for grad, want in zip(grads, wanted, strict=True))
        reduced = ctx.flat.engine.gradients.receive(ctx.flat, ctx.indices, grads)
        return (reduced, None, None, *(None for _ in grads))


class ReduceMean(torch.autograd.Function):
    """Whole gradients of this rank -> this rank's part of their mean over ranks, differentiable.

    [Note: derivatives across ranks]
    Each rank computes the derivative of its own loss, and the engine takes the mean over ranks at the
    very end. So the backward of a mean over ranks is a plain gather, and the backward of a gather is a
    mean over ranks: the factors 1/N meet in that final mean.
    """

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, flat: Flat) -> torch.Tensor:
        ctx.flat = flat
        return flat.engine.gradients.mean(flat, whole.clone())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        flat = ctx.flat
        return (GatherNow if flat.engine.sharded else ReduceMean).apply(grad, flat), None


class GatherNow(torch.autograd.Function):
    """A shard-sized buffer -> the whole buffer, differentiable. See [Note: derivatives across ranks]."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, flat: Flat) -> torch.Tensor:
        ctx.flat = flat
        return flat.engine.gradients.gather(flat, shard)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ReduceMean.apply(grad, ctx.flat), None


class SavedView:
    """Stands for a saved tensor that lies in a gathered buffer: where it is, not what it holds."""

    __slots__ = ("flat", "index", "offset", "size", "stride", "version")

    def __init__(self, flat: Flat, tensor: torch.Tensor) -> None:
        self.flat = flat
        self.offset, self.size, self.stride = int(tensor.storage_offset()), tensor.size(), tensor.stride()
        self.index = flat.index_at(self.offset)
        self.version = flat.versions[self.index]

    def unpack(self) -> torch.Tensor:
        flat = self.flat
        flat.check_version(self.index, self.version)
        flat.engine.need(flat)
        flat.engine.gradients.start_what_can()
        return flat.gathered.as_strided(self.size, self.stride, self.offset)


class SavedTensors:
    """The saved-tensor hooks of one engine, chained to the pair that was active before.

    Only the innermost pair of hooks is called by autograd, so what is not ours goes to the outer pair
    (activation offloading, non-reentrant checkpointing). Checkpointing counts what it packs; we take out
    the same tensors in the forward pass and in its recomputation, so its count holds.
    """

    def __init__(self, engine: Engine, outer: tuple[Callable[..., Any], Callable[..., Any]] | None) -> None:
        self.engine, self.outer = engine, outer

    def pack(self, tensor: torch.Tensor) -> Any:
        flat = self.engine.flat_of_storage(tensor)
        if flat is not None and tensor.dtype == flat.dtype:
            return SavedView(flat, tensor)
        return tensor if self.outer is None else self.outer[0](tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is SavedView:
            return packed.unpack()
        return packed if self.outer is None else self.outer[1](packed)

    @staticmethod
    def push(engine: Engine, *, over_others: bool = True) -> bool:
        """Activate the hooks of `engine` unless they are on top already. Returns whether `pop` is owed.

        Outside a unit's forward `over_others` is False: the recomputation of a checkpoint that lies inside a
        unit must save there what its forward pass saved, when the checkpoint's own hooks were innermost.
        """
        if not torch.is_grad_enabled() or not _hooks_enabled():
            return False
        top = _autograd._top_saved_tensors_default_hooks(False)
        owner = getattr(top[0], "__self__", None) if top is not None else None
        if isinstance(owner, SavedTensors) and owner.engine is engine:
            return False
        if top is not None and not over_others:
            return False
        hooks = SavedTensors(engine, top)
        _autograd._push_saved_tensors_default_hooks(hooks.pack, hooks.unpack)
        return True

    @staticmethod
    def pop() -> None:
        _autograd._pop_saved_tensors_default_hooks()
