"""ShardedParameter and its gradient: whole to look at, a slice in memory.

Both are tensors without storage (`_make_wrapper_subclass`) that report the whole shape, dtype and device.
`__torch_function__` decides what an operation on them means; the table is in operations.py.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from shardproof.errors import EngineError
from shardproof.zero.autograd import GatherNow, SavedTensors, in_backward, outside_transforms, sharded_values, unshard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardproof.zero.schedule.engine import Engine
    from shardproof.zero.units.flat import Flat


_Tensor = TypeVar("_Tensor", bound="ShardedTensor")
_GRAD: Any = torch.Tensor.grad  # the attribute that autograd itself writes to
_LOADS_STATE = Optimizer._process_value_according_to_param_policy.__code__
_SAME_VALUE = {torch.ops.aten.view.default, torch.ops.aten.alias.default, torch.ops.aten.detach.default}


class ShardedTensor(torch.Tensor):
    """Common to parameter and gradient. `local` is this rank's slice, `whole()` the whole value; `own`: the earlier
    slice, if somebody holds this object and the parameter was given another one (`p.data = ...`, `p.grad = ...`)."""

    flat: Flat
    index: int  # type: ignore[assignment]
    own: torch.Tensor | None = None

    @classmethod
    def wrap(cls, flat: Flat, index: int, dtype: torch.dtype, requires_grad: bool) -> Any:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return cls.wrap(flat, index, dtype, requires_grad)
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            flat.shapes[index],
            strides=flat.strides[index],
            dtype=dtype,
            device=flat.engine.comm.device,
            requires_grad=requires_grad,
        )
        self.flat, self.index = flat, index
        return self

    def __hash__(self) -> int:
        return id(self)  # as torch does: a dict that knew the plain parameter still finds it

    @property
    def qualified_name(self) -> str:
        return self.flat.names[self.index]

    @property
    def local(self) -> torch.Tensor:
        """This rank's slice, a plain tensor that shares memory: 1-D, or in its own shape where nothing is sharded."""
        raise NotImplementedError

    def whole(self) -> torch.Tensor:
        """The whole value, a plain tensor, connected to autograd."""
        raise NotImplementedError

    def write(self, value: torch.Tensor) -> None:
        """Take `value`, a whole plain tensor, as the new value; each rank keeps its slice.

        Raises:
            EngineError: it has another shape.
        """
        if tuple(value.shape) != self.flat.shapes[self.index]:
            raise EngineError(
                f"'{self.qualified_name}' has the shape {self.flat.shapes[self.index]}, and would get "
                f"{tuple(value.shape)}. A sharded parameter keeps its shape: change it before shardproof.shard."
            )
        self.before_change()
        with torch.no_grad():
            self.local.view(-1).copy_(self.flat.slice_of(value, self.index))
        self.value_changed()
        self.note_written("write", [value])

    def note_written(self, operation: str, operands: Iterable[Any]) -> None:
        """Have ranks compare this write. See [Note: written] in ranks/written.py."""
        self.flat.engine.written.note((False, self.flat.index, self.index), operation, operands)

    def stays(self, conversion: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a conversion such as `Tensor.to` returns its input. Tried out of sight of modes: a recomputation must
        not run more operations than its forward pass, which had the whole parameter at hand."""
        dtype, device = self.dtype, self.device
        kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}  # a slice has none
        with self.flat.engine.unseen(), torch._C.DisableTorchFunctionSubclass():
            probe = torch.empty(0, dtype=dtype, device=device)
            return conversion(probe, *args, **kwargs) is probe

    def before_change(self) -> None:
        """Called before every change of `local`."""

    def value_changed(self) -> None:
        """Called after every change of `local`."""

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        first, last = self.flat.range_in_parameter(self.index)
        return (
            f"{type(self).__name__}({self.qualified_name}, shape={self.flat.shapes[self.index]}, "
            f"dtype={self.dtype}, device={self.device}, this rank holds elements {first}:{last})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        value = self.whole().detach().clone()
        if isinstance(self, nn.Parameter):
            return nn.Parameter, (value, self.flat.requires_grad[self.index])
        return value.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from shardproof.zero.tensors.operations import run

        return run(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        x: Any = args[0] if args else None
        if func in _SAME_VALUE and _keeps_shape(x, *args[1:]):  # torch looks for its node in the graph
            return x.another() if isinstance(x, ShardedValue) else ShardedValue.wrap(x.flat, x.index, x.dtype, False)
        if func is torch.ops.aten.set_.source_Tensor and args[0] is args[1]:  # torch parametrizes it: nothing changes
            return args[0]
        found = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, ShardedTensor)]
        # A transform of torch.func over detached parameters. Concatenating them is refused, as that is
        # how DistributedDataParallel begins.
        detached = all(type(x) is ShardedValue for x in found) and func is not torch.ops.aten.cat.default
        if detached and not func._schema.is_mutable:
            plain = torch.utils._pytree.tree_map_only(ShardedValue, lambda value: value.whole(), (args, kwargs or {}))
            return func(*plain[0], **plain[1])
        name = f"the sharded parameter '{found[0].qualified_name}'" if found else "a sharded parameter"
        raise EngineError(
            f"{func} reached {name} below torch's Python functions, where it cannot be gathered. Use `with "
            "shardproof.whole(model):` around this call; what shards or replicates by itself (DistributedDataParallel, "
            "fully_shard) is not needed around a model that is sharded already."
        )


def _keeps_shape(x: torch.Tensor, shape: Sequence[int] | None = None) -> bool:
    """Whether a view of this shape has the shape of its base."""
    if shape is None:
        return True
    return len(shape) == x.dim() and all(new in (-1, old) for new, old in zip(shape, x.shape, strict=True))


def by_engine(tensors: Iterable[_Tensor]) -> dict[Engine, list[_Tensor]]:
    """Tensors grouped by engine."""
    found: dict[Engine, list[_Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.flat.engine, []).append(tensor)
    return found


def in_the_model(tensor: ShardedTensor) -> tuple[int, int, int]:
    """A sort key that gives the same order on all ranks."""
    return tensor.flat.engine.number, tensor.flat.index, tensor.index


class ShardedValue(ShardedTensor):
    """The value of a parameter outside autograd: the result of `p.data` and `p.detach()`.

    Attributes:
        is_trained: whether it is a leaf of its own, with a whole gradient of this rank (`p.detach().requires_grad_()`).
    """

    is_trained = False

    def another(self) -> ShardedValue:
        """A second object with the same values."""
        value: ShardedValue = ShardedValue.wrap(self.flat, self.index, self.dtype, False)
        value.own = self.own
        return value if self.own is not None else self.flat.engine.copies.of_data(value)

    def assign(self, value: torch.Tensor) -> None:
        """`p.data = value`, of the same shape, dtype and device. Earlier results of `p.data` keep their values."""
        flat, index = self.flat, self.index
        if isinstance(value, ShardedValue) and value.flat is flat and value.index == index:
            if value.own is None:
                return
            flat.engine.copies.leave_data(flat, index)
            self.before_change()
            with torch.no_grad():
                self.local.copy_(value.own)
            self.value_changed()
            value.own = None  # it is the parameter's value once more
            flat.engine.copies.of_data(value)
            return
        whole = value.whole() if isinstance(value, ShardedTensor) else value
        flat.engine.copies.leave_data(flat, index)
        self.write(whole)

    @property
    def local(self) -> torch.Tensor:
        if self.own is not None:
            return self.own
        self.flat.take_in_edits()
        return self.flat.locals[self.index]

    def whole(self) -> torch.Tensor:
        flat, index = self.flat, self.index
        if self.is_trained and torch.is_grad_enabled():
            return WholeOfLeaf.apply(self)  # type: ignore[no-any-return]
        if self.own is not None:
            slices = flat.engine.gradients.gather_slices(flat, index, self.own.view(-1))
            return slices.view(flat.shapes[index]).to(self.dtype)
        if flat.open_views is not None:
            return flat.open_views[index].detach()
        with outside_transforms():
            flat.engine.need(flat)
            return flat.standing.value(index)

    def before_change(self) -> None:
        if self.own is None:
            self.flat.engine.copies.take_in_values()
            self.flat.engine.edits.begin(self.flat, self.index)
            self.flat.before_change()

    def value_changed(self) -> None:
        if self.own is None:
            self.flat.changed(self.index)
            self.flat.engine.edits.end(self.flat, self.index)

    def note_written(self, operation: str, operands: Iterable[Any]) -> None:
        if self.own is None:
            super().note_written(operation, operands)


class WholeOfLeaf(torch.autograd.Function):
    """The whole value of a detached parameter that requires a gradient, as reentrant checkpointing makes of parameters
    among its arguments."""

    @staticmethod
    def forward(ctx: Any, value: ShardedValue) -> torch.Tensor:
        ctx.dtype = value.dtype
        return value.whole()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.to(ctx.dtype)


OURS = {"flat", "index", "owner", "stand_in"}


def written_on(p: torch.Tensor) -> dict[str, Any]:
    """Attributes that a user has set on a parameter for an optimizer to read: `p.label = "muon"`."""
    return {name: value for name, value in p.__dict__.items() if name not in OURS and not name.startswith("_")}


class ShardedParameter(ShardedValue, nn.Parameter):
    """A parameter that is whole to the user's code and a shard in memory.

    Shape, numel, dtype, norm and gradient are those of the whole parameter. Computing with it anywhere
    gathers it through autograd; an optimizer's step sees this rank's slice.

    Attributes:
        owner: the rank of the shard group that updates it whole, once a matrix optimizer has it; see optim/owners.py.
        stand_in: what such an optimizer sees instead: the whole on its owner during a step, otherwise nothing.
    """

    owner: int | None = None
    stand_in: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of the whole value. Inside `Optimizer.load_state_dict`, which casts state to it, the master's: in a
        lower one the state would lose digits before any hook of the engine sees the optimizer."""
        loads = sys._getframe(1).f_code is _LOADS_STATE
        return self.flat.shard.dtype if loads else self.flat.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of the whole value; inside `Optimizer.load_state_dict`, that of the shard."""
        loads = sys._getframe(1).f_code is _LOADS_STATE
        return self.flat.device if loads else self.flat.engine.comm.device

    @property
    def grad(self) -> Any:  # torch's own attribute would go through __torch_function__: 10 times slower
        return self.flat.engine.gradients.get(self.flat, self.index)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.flat.engine.gradients.set(self.flat, self.index, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def whole(self) -> torch.Tensor:
        flat, index = self.flat, self.index
        if flat.open_views is not None:
            return flat.open_views[index]
        with flat.engine.unseen(), outside_transforms():
            flat.engine.need(flat)
            if flat.requires_grad[index] and torch.is_grad_enabled():
                if in_backward():
                    flat.engine.invariants.computed_again(flat.unit)
                return unshard(flat, [index])[0]
            return flat.standing.value(index)

    def listen(self) -> None:
        """Take over gradients that autograd itself accumulates on this tensor.

        Code that passes the parameter to a function below torch's Python functions (`MyFunction.apply(x, weight)`)
        makes it a leaf of the graph.
        """
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.register_post_accumulate_grad_hook(self, hand_over)

    def take_over(self, p: nn.Parameter) -> None:
        """Take over the settings for gradients of `p`: their dtype, and its hooks, in the same dicts, through which
        their handles remove them."""
        if p.grad_dtype != p.dtype:
            self.grad_dtype = p.grad_dtype
        kept = {"_backward_hooks": self.flat.gradient_hooks, "_post_accumulate_grad_hooks": self.flat.post_hooks}
        for name, hooks in kept.items():
            if registered := getattr(p, name):
                hooks[self.index] = registered
                setattr(p, name, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        engine = self.flat.engine
        if id(engine.model) in memo and not engine.whole_depth:  # with its model, whose copy is sharded too
            deepcopy(self.flat, memo)
            return memo[id(self)]
        copy = nn.Parameter(self.whole().detach().clone(), requires_grad=self.flat.requires_grad[self.index])
        memo[id(self)] = copy
        return copy


sharded_values |= {ShardedValue, ShardedParameter}


def hand_over(p: Any) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        grad = _GRAD.__get__(p)
        _GRAD.__set__(p, None)
    if grad is None:  # the end of an ordinary gather: its gradients were received before
        return
    p = getattr(p, "became", p)  # of a graph from before the cut
    p.flat.engine.gradients.receive(p.flat, [(p.index, grad)], {})


class ShardedGradient(ShardedTensor):
    """The gradient of a sharded parameter, bound to the buffer it was computed in."""

    buffer: torch.Tensor

    @classmethod
    def of(cls, flat: Flat, index: int, buffer: torch.Tensor) -> ShardedGradient:
        self = cls.wrap(flat, index, buffer.dtype, False)
        self.buffer = buffer
        return self

    @property
    def local(self) -> torch.Tensor:
        self.settle()
        return self.flat.slice_in(self.buffer, self.index) if self.own is None else self.own

    def settle(self) -> None:
        """Take in later additions and edits: this object may have been held across a backward pass."""
        engine = self.flat.engine
        if engine.gradients.dirty and self.buffer is self.flat.grad:
            engine.gradients.finish()
        engine.copies.take_in_gradients()

    def value_changed(self) -> None:
        self.flat.gradient_changed()

    def note_written(self, operation: str, operands: Iterable[Any]) -> None:
        if self.buffer is self.flat.grad:
            self.flat.engine.written.note((True, self.flat.index, self.index), operation, operands)

    def whole(self) -> torch.Tensor:
        flat, index = self.flat, self.index
        if flat.in_graph(self.buffer, index):
            return flat.view(GatherNow.apply(flat.at_work(self.buffer), flat), index)
        whole = flat.engine.gradients.gather_slices(flat, index, self.local)
        return flat.engine.copies.of_gradient(whole, self).view(flat.shapes[index])


def use_saved_tensors(tensors: list[ShardedTensor]) -> int:
    """Push the saved-tensor hooks of the engines that own `tensors`; returns how many pops are owed."""
    return sum(SavedTensors.push(engine, over_others=False) for engine in by_engine(tensors))
