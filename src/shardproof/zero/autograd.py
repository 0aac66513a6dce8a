"""Gathering as an autograd function, and the hooks for saved tensors.

[Note: why an autograd function]
Autograd itself guarantees that the backward of a gather runs after every consumer of that gather has
contributed. A block used twice is gathered twice and reduced twice, and since reduction is linear the
sum is right. There is no "ready" flag that could be set twice, and nothing that must happen exactly once.
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


# Elements. Below this, a separate node costs more (some 35 us of Python) than copying a gradient that has left the
# cache. On an accelerator it has left it anyway; there, separate nodes only keep large gradients from piling up.
SMALL, SMALL_QUEUED = 2**17, 2**23
# Suspends the transforms of torch.func (vmap, grad, jvp ...): gathered values are plain constants to them.
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
    """Outside of all modes: gathered values may be needed after the current mode has ended."""
    plain = torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and _transforms() is None
    return nullcontext() if plain else _outside_modes()


def unshard(flat: Flat, indices: Sequence[int]) -> list[torch.Tensor]:
    """Parameters of an acquired flat as whole, plain views of its gathered buffer, connected to autograd. To be called
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
    if len(nodes) != 1:  # a single node marks the end of the gather itself
        gather, whole_flat = Gather.apply(flat.leaf, flat, whole_flat, collected), None
    for node in nodes:
        plain = _unshard(gather, flat, node, whole_flat, collected, *(flat.params[i] for i in node))
        views.update(zip(node, plain, strict=True))
    return [views[i] for i in indices]


class Gather(torch.autograd.Function):
    """One gather of a flat: its leaf (the shard) -> an empty tensor, whose node precedes the `Unshard`s of the gather.

    Its backward runs when every use has contributed its gradient. It returns nothing to the leaf, unless
    `torch.autograd.grad` asks for that gradient.
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
    """A gather -> whole parameters, each a plain view of the gathered buffer: one large one, or all small ones. If it
    is the only one of its gather (`whole_flat` is not None), its input is the leaf, and it acts as the `Gather`, too.

    Its backward passes the whole gradients of this rank to the engine as soon as they exist, while they are in cache,
    and nothing to autograd. The parameters are inputs so that the graph knows them (`loss.backward(inputs=[...])`);
    `torch.autograd.grad` inside a backward pass gets what it asks for.
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
        # Autograd runs the newest node first. This one is older than all its users, but should run without delay.
        ctx._set_sequence_nr(_FIRST)
        return tuple(flat.plain_views(indices))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        gradients, got = ctx.flat.engine.gradients, []
        returned: list[torch.Tensor | None] = [None] * len(grads)
        (before, _), *leaves = ctx.next_functions  # torch builds this list anew on each access
        # Users never name the gather or the leaf: if its gradient is asked for, all gradients are.
        every = ctx.flat.captured is not None or asked_for(before)
        for place, (index, grad) in enumerate(zip(ctx.indices, grads, strict=True)):
            if grad is None:
                continue
            # `loss.backward(inputs=[...])` may name only some: the others' gradients arrive without being asked for.
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
    """Whether this backward pass continues to a leaf; None if it returns the gradient there (`torch.autograd.grad`)."""
    try:
        return _will_run(leaf)
    except RuntimeError:
        return None


SHOWN_BY: type = Unshard._backward_cls  # type: ignore[attr-defined]
# Skips the check for torch.func's tensors in `apply`, a tenth of the cost of a node: see `outside_transforms`.
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


# The classes of tensors/parameter.py: `MyFunction.apply(x, weight)` may save one itself.
sharded_values: set[type] = set()


class SavedView:
    """Stands in for a saved tensor that lies in a gathered buffer: records where it lies, not its values."""

    __slots__ = ("conjugate", "edits", "flat", "index", "offset", "size", "stride", "tensor", "version")

    def __init__(self, flat: Flat, tensor: torch.Tensor) -> None:
        self.flat = flat
        wrapped = type(tensor) in sharded_values
        self.offset = flat.offsets[cast("Any", tensor).index] if wrapped else int(tensor.storage_offset())
        self.index = flat.index_at(self.offset)
        self.version = flat.versions[self.index]
        # Where ranks hold everything, the tensor exists until the step, and only has to be checked for changes.
        self.tensor = None if wrapped or flat.engine.sharded or flat.engine.frugal else tensor
        if self.tensor is None:
            self.size, self.stride, self.conjugate = tensor.size(), tensor.stride(), tensor.is_conj()
        else:
            self.edits = tensor._version

    def unpack(self) -> torch.Tensor:
        flat = self.flat
        # After the first steps torch checks this itself: see `push`.
        edited = self.tensor is not None and self.tensor._version != self.edits
        flat.check_version(self.index, -1 if edited else self.version)
        flat.engine.gradients.start_what_can()
        if flat.engine.deterministic and in_backward():  # a pass that leaves no gradient counts, too
            flat.engine.gradients.note_backward()
        if self.tensor is not None:
            return self.tensor
        flat.engine.need(flat)
        view = flat.gathered.as_strided(self.size, self.stride, self.offset)
        return view.conj() if self.conjugate else view


def _changed(tensor: torch.Tensor, version: int, output: tuple[int, str] | None) -> str:
    """In torch's own words, which users can search for."""
    of = "" if output is None else f", which is output {output[0]} of {output[1]},"
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}]{of} is at version {tensor._version}; expected version {version} "
        "instead. An operation of the forward pass keeps it for backward: write x = x + y for x += y, torch.where for "
        "x[mask] = y, inplace=False. torch.autograd.set_detect_anomaly(True) shows which operation it is."
    )


class SavedTensors:
    """The saved-tensor hooks of one engine, chained to the pair that was active before.

    Autograd calls only the innermost pair of hooks, so tensors that are not ours are passed on to the outer pair
    (activation offloading, non-reentrant checkpointing). Checkpointing counts the tensors it packs; we take out
    the same ones in the forward pass and in its recomputation, so its count holds.

    torch checks the versions of tensors that it saves itself, but leaves that to hooks if there are any: ours do it.
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
        # Detached: a node that saves its own output would hold itself, and a forward without a backward would leak.
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
        """Activate the hooks of `engine` unless they are on top already. Returns whether a `pop` has to follow.

        Outside a unit's forward `over_others` is False: the recomputation of a checkpoint inside a unit must save the
        same tensors as its forward pass did, when the checkpoint's own hooks were innermost.

        Where everything stays gathered, no hooks are used after the first steps, by which time mistakes in a program
        have shown up: torch saves weights like any other tensor, and reports it itself if they were changed.
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
