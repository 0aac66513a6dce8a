"""Gathering as an autograd function, and what saved tensors become.

[Note: why an autograd function]
Autograd itself guarantees that the backward of a gather runs after every consumer of that gather has
contributed. A block used twice is gathered twice and reduced twice, and since reduction is linear the
sum is right. There is no "ready" flag that could be set twice and nothing that must happen once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._C import _autograd
from torch._functorch import pyfunctorch

from shardproof.errors import ChangedInPlaceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardproof.zero.schedule.engine import Engine
    from shardproof.zero.tensors.parameter import ShardedParameter
    from shardproof.zero.units.flat import Flat


# Elements. Up to here a node of its own costs more (some 35 us of Python) than a gradient that has left the cache. What
# an accelerator copies has left it in any case: there a node is for gradients that would take much memory together.
SMALL, SMALL_QUEUED = 2**17, 2**23
# Inside, those of torch.func (vmap, grad, jvp ...) are not there: what is gathered is plain to them, a constant.
outside_transforms = pyfunctorch.temporarily_clear_interpreter_stack
_transforms: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_FIRST = 2**64 - 1  # the sequence number of torch's own AccumulateGrad
_will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
_hooks_enabled: Callable[[], bool] = _autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def _outside_modes() -> Iterator[None]:
    with torch.inference_mode(False), torch.enable_grad(), outside_transforms():
        yield


def plainly() -> AbstractContextManager[None]:
    """As where no mode is on: what is gathered may be needed outside of the one in which it is."""
    plain = torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and _transforms() is None
    return nullcontext() if plain else _outside_modes()


def unshard(flat: Flat, indices: Sequence[int]) -> list[torch.Tensor]:
    """Parameters of an acquired flat as whole, plain views of its gathered buffer, connected to autograd. Call it
    `outside_transforms`."""
    collected: dict[int, torch.Tensor] = {}
    learning = [i for i in indices if flat.requires_grad[i]]
    small = SMALL if flat.engine.pool.keeps else SMALL_QUEUED  # it keeps buffers on processors, also imagined ones
    nodes = [[i] for i in learning if flat.numels[i] > small]
    if few := [i for i in learning if flat.numels[i] <= small]:
        nodes.append(few)
    frozen = [i for i in indices if not flat.requires_grad[i]]
    views = dict(zip(frozen, flat.plain_views(frozen), strict=True))
    whole_flat: bool | None = len(indices) == len(flat.names)
    gather = flat.leaf
    if len(nodes) != 1:  # of one node the end is that of the gather
        gather, whole_flat = Gather.apply(flat.leaf, flat, whole_flat, collected), None
    for node in nodes:
        plain = _unshard(gather, flat, node, whole_flat, collected, *(flat.params[i] for i in node))
        views.update(zip(node, plain, strict=True))
    return [views[i] for i in indices]


class Gather(torch.autograd.Function):
    """One gather of a flat: its leaf (the shard) -> nothing, but a node that comes before several that use the gather.

    Its backward runs when every use has contributed its gradient. It returns nothing to the leaf, except where
    `torch.autograd.grad` asks for it.
    """

    @staticmethod
    def forward(
        ctx: Any, leaf: torch.Tensor, flat: Flat, whole_flat: bool, collected: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        ctx.flat, ctx.whole_flat, ctx.collected = flat, whole_flat, collected
        ctx.set_materialize_grads(False)
        ctx._set_sequence_nr(_FIRST)
        return leaf.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[torch.Tensor | None, ...]:
        gradients = ctx.flat.engine.gradients
        return (gradients.gather_is_over(ctx.flat, ctx.whole_flat, ctx.collected), None, None, None)


class Unshard(torch.autograd.Function):
    """A gather -> whole parameters, each a plain view of the gathered buffer: one large one, or all small ones. Where
    that is all of the gather (`whole_flat` is not None), it comes from the leaf itself, and is a `Gather`, too.

    Its backward hands the whole gradients of this rank to the engine as soon as they are there, while they are in
    cache, and nothing to autograd. The parameters are inputs so that the graph knows them
    (`loss.backward(inputs=[...])`); `torch.autograd.grad` inside of a backward pass gets what it asks for.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gather: torch.Tensor,
        flat: Flat,
        indices: list[int],
        whole_flat: bool | None,
        collected: dict[int, torch.Tensor],
        *params: ShardedParameter,
    ) -> tuple[torch.Tensor, ...]:
        ctx.flat, ctx.indices, ctx.whole_flat, ctx.collected = flat, indices, whole_flat, collected
        ctx.set_materialize_grads(False)
        # Autograd runs what was made last first. This was made before all that uses it, but shall run at once.
        ctx._set_sequence_nr(_FIRST)
        return tuple(flat.plain_views(indices))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        gradients, got = ctx.flat.engine.gradients, []
        returned: list[torch.Tensor | None] = [None] * len(grads)
        (before, _), *leaves = ctx.next_functions  # which torch makes anew each time
        # Nobody names the gather, or the leaf: where that is asked for, all are.
        every = ctx.flat.captured is not None or asked_for(before)
        for place, (index, grad) in enumerate(zip(ctx.indices, grads, strict=True)):
            if grad is None:
                continue
            # `loss.backward(inputs=[...])` may name some of them: the others' gradients come, and are not asked for.
            asked = every or asked_for(leaves[place][0])
            if asked is None:
                returned[place] = gradients.hooked(ctx.flat, index, grad)
            elif asked:
                got.append((index, grad))
        if got:
            gradients.receive(ctx.flat, got, ctx.collected)
        reduced = None
        if ctx.whole_flat is not None:
            reduced = gradients.gather_is_over(ctx.flat, ctx.whole_flat, ctx.collected)
        return (reduced, None, None, None, None, *returned)


def asked_for(leaf: Any) -> bool | None:
    """Whether this backward pass goes on to a leaf; None if it returns what comes there (`torch.autograd.grad`)."""
    try:
        return _will_run(leaf)
    except RuntimeError:
        return None


SHOWN_BY: type = Unshard._backward_cls  # type: ignore[attr-defined]
# Past the search for tensors of torch.func that `apply` makes each time, a tenth of what a node costs: see
# `outside_transforms`.
_unshard = super(torch.autograd.Function, Unshard).apply


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


# The classes of tensors/parameter.py whose values lie in a gathered buffer: `MyFunction.apply(x, weight)` saves one.
sharded_values: set[type] = set()


class SavedView:
    """Stands for a saved tensor that lies in a gathered buffer: where it is, not what it holds."""

    __slots__ = ("conjugate", "edits", "flat", "index", "offset", "size", "stride", "tensor", "version")

    def __init__(self, flat: Flat, tensor: torch.Tensor) -> None:
        self.flat = flat
        wrapped = type(tensor) in sharded_values
        self.offset = flat.offsets[cast("Any", tensor).index] if wrapped else int(tensor.storage_offset())
        self.index = flat.index_at(self.offset)
        self.version = flat.versions[self.index]
        # Where ranks hold everything it is there until the step, and only asked whether it has changed.
        self.tensor = None if wrapped or flat.engine.sharded or flat.engine.frugal else tensor
        if self.tensor is None:
            self.size, self.stride, self.conjugate = tensor.size(), tensor.stride(), tensor.is_conj()
        else:
            self.edits = tensor._version

    def unpack(self) -> torch.Tensor:
        flat = self.flat
        # As torch will say behind the first steps: see `push`.
        edited = self.tensor is not None and self.tensor._version != self.edits
        flat.check_version(self.index, -1 if edited else self.version)
        flat.engine.gradients.start_what_can()
        if flat.engine.deterministic and in_backward():  # a pass that leaves no gradient is one, too
            flat.engine.gradients.note_backward()
        if self.tensor is not None:
            return self.tensor
        flat.engine.need(flat)
        view = flat.gathered.as_strided(self.size, self.stride, self.offset)
        return view.conj() if self.conjugate else view


def _changed(tensor: torch.Tensor, version: int, output: tuple[int, str] | None) -> str:
    """In torch's words, by which people look it up."""
    of = "" if output is None else f", which is output {output[0]} of {output[1]},"
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}]{of} is at version {tensor._version}; expected version {version} "
        "instead. An operation of the forward pass keeps it for backward: write x = x + y for x += y, torch.where for "
        "x[mask] = y, inplace=False. torch.autograd.set_detect_anomaly(True) shows which operation it is."
    )


class SavedTensors:
    """The saved-tensor hooks of one engine, chained to the pair that was active before.

    Only the innermost pair of hooks is called by autograd, so what is not ours goes to the outer pair
    (activation offloading, non-reentrant checkpointing). Checkpointing counts what it packs; we take out
    the same tensors in the forward pass and in its recomputation, so its count holds.

    torch compares the version of what it saves itself, and leaves that to hooks where there are any: ours do.
    """

    def __init__(self, engine: Engine, outer: tuple[Callable[..., Any], Callable[..., Any]] | None) -> None:
        self.engine, self.outer = engine, outer

    def pack(self, tensor: torch.Tensor) -> Any:
        if type(tensor) in sharded_values and cast("Any", tensor).own is None:
            flat = cast("Any", tensor).flat
            flat.engine.asking.add(flat.index)
            return SavedView(flat, tensor)
        flat = self.engine.flat_of_storage(tensor)
        if flat is not None and tensor.dtype == flat.dtype:
            self.engine.asking.add(flat.index)
            return SavedView(flat, tensor)
        if self.outer is not None:
            return self.outer[0](tensor)
        # Detached: what saves its own output would hold itself, and a forward without a backward stay for good.
        node = tensor.grad_fn
        return tensor.detach(), tensor._version, None if node is None else (tensor.output_nr, node.name())

    def unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is SavedView:
            return packed.unpack()
        if self.outer is not None:
            return self.outer[1](packed)
        tensor, version, output = packed
        if tensor._version != version:
            raise ChangedInPlaceError(_changed(tensor, version, output))
        return tensor

    @staticmethod
    def push(engine: Engine, *, over_others: bool = True) -> bool:
        """Activate the hooks of `engine` unless they are on top already. Returns whether `pop` is owed.

        Outside a unit's forward `over_others` is False: the recomputation of a checkpoint that lies inside a
        unit must save there what its forward pass saved, when the checkpoint's own hooks were innermost.

        Where everything stays gathered there are none behind the first steps, in which what is wrong with a program
        shows itself: torch saves the weights as it saves others, and says of them, too, that they were changed.
        """
        if not torch.is_grad_enabled() or not _hooks_enabled():
            return False
        top = _autograd._top_saved_tensors_default_hooks(False)
        if top is None and engine.stands and not engine.invariants.early:
            return False
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
