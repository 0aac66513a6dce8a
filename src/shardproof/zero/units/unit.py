"""Unit: the parameters that are gathered and reduced together."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from copy import deepcopy
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from shardproof.errors import EngineError
from shardproof.zero.autograd import in_backward
from shardproof.zero.units.flat import Flat

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardproof.zero.schedule.engine import Engine

_ENGINE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_DYNAMO = os.path.join(os.path.dirname(torch.__file__), "_dynamo") + os.sep


@dataclass
class Counters:
    """A unit's communication since `shard`; see `stats.UnitStats`."""

    gathers: int = 0
    reductions: int = 0
    prefetch_hits: int = 0
    bytes_gathered: int = 0
    bytes_reduced: int = 0
    bytes_between_replicas: int = 0
    bytes_between_nodes: int = 0
    gathered_peak_bytes: int = 0


class Slot:
    """A place in the module tree that holds a parameter. A tied parameter has several.

    Attributes:
        module: returns the module, or None if it is gone; see [Note: what belongs to the model] in belonging.py.
    """

    def __init__(self, module: nn.Module, name: str, flat: Flat, index: int) -> None:
        self.module = weakref.ref(module)
        self.name, self.flat, self.index = name, flat, index

    @property
    def parameters(self) -> dict[str, torch.Tensor | None]:
        """The parameters of the module, by name."""
        module = self.module()
        return {} if module is None else cast("dict[str, torch.Tensor | None]", module._parameters)

    def put_back(self, view: torch.Tensor) -> None:
        """Put the parameter back in place of the plain tensor, if that is still here."""
        here, name, p = self.module(), self.name, self.flat.params[self.index]
        if here is None:
            return
        if (
            here._buffers.get(name) is view
        ):  # torch had parametrized it meanwhile, and filed the plain tensor as a buffer
            del here._buffers[name]
            here._parameters[name] = view  # type: ignore[assignment]
        if here._parameters.get(name) is view:
            here._parameters[name] = p
            if isinstance(here, nn.RNNBase):  # also keeps a list of them, which would keep the gathered buffer alive
                here.__dict__["_flat_weights"] = [p if w is view else w for w in here._flat_weights]


@dataclass(eq=False)
class Unit:
    """The parameters that are gathered together: those of a repeated block, or the root with everything else.

    Attributes:
        entries: the modules whose forward opens the unit (the block; for the root, every module around blocks).
        depth: number of forwards of its entries under way.
        hooked: for each forward under way, whether saved-tensor hooks were pushed for it.
        frame, thread: the frame that called the outermost of these forwards, and its thread.
        compiled_around: the engine's `open` and `close` as Dynamo is to call them, once it is loaded.
    """

    engine: Engine | None
    name: str
    index: int
    flats: list[Flat] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    depth: int = 0
    hooked: list[bool] = field(default_factory=list)
    frame: FrameType | None = None
    thread: int = 0
    compiled_around: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    counters: Counters = field(default_factory=Counters)
    _entries: list[weakref.ref[nn.Module]] = field(default_factory=list)

    @property
    def entries(self) -> list[nn.Module]:
        return [module for each in self._entries if (module := each()) is not None]

    @property
    def is_root(self) -> bool:
        return self.index == 0

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered buffers, complete or under way, beyond the shards."""
        return sum(
            f.whole.nbytes - (0 if f.kept is None else f.shard.nbytes)
            for f in self.flats
            if f.whole is not None and f.whole is not f.shard
        )

    @property
    def shard_bytes(self) -> int:
        return sum(f.shard.numel() * f.shard.element_size() for f in self.flats)

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward pre-hook of the entries."""
        if self.engine is None:
            return None
        if not self.engine.whole_depth and (torch.jit.is_tracing() or torch.compiler.is_exporting()):
            raise EngineError(
                "A sharded model cannot be recorded (torch.jit.trace, torch.export, ONNX): it gathers its parameters "
                "from other ranks. Record it inside `with shardproof.whole(model):`, on all ranks."
            )
        if self.compiled_around is None and "torch._dynamo" in sys.modules:
            # Dynamo must run the hooks uncompiled, and compile only what lies between them.
            disable = torch.compiler.disable
            self.compiled_around = disable(self.engine.open), disable(self.engine.close)
        opened = self.engine.open if self.compiled_around is None else self.compiled_around[0]
        return opened(self, args, kwargs)

    def begin(self) -> None:
        """Remember the frame that opens the unit: the innermost one that is neither ours nor Dynamo's."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith((_ENGINE, _DYNAMO)):
            frame = frame.f_back
        self.frame, self.thread = frame, threading.get_ident()

    @property
    def aborted(self) -> bool:
        """Whether the unit is open although the frame that opened it has ended. torch calls hooks after a forward that
        raised an exception, but not after one that was ended by Ctrl-C."""
        if not self.depth:
            return False
        # With an accelerator, a backward pass inside a forward runs in one of torch's threads, while ours waits.
        here = self.thread == threading.get_ident()
        frame: FrameType | None = sys._getframe(1) if here else sys._current_frames().get(self.thread)
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is None

    @property
    def is_taken(self) -> bool:
        """Whether another thread is in the model's forward, at a stage where its gathers would cross those of this one.
        A backward pass inside a forward runs in one of torch's threads while this one waits."""
        if not self.depth or self.thread == threading.get_ident() or not self.is_root or in_backward():
            return False
        return self.engine is not None and self.engine.sharded and not self.aborted

    def check_thread(self) -> None:
        """Raise EngineError where the ranks would otherwise wait for each other forever."""
        if self.is_taken:
            raise EngineError(
                "Two threads compute with a sharded model at the same time. At stages 1 to 3 on several ranks only one "
                "thread may at a time: take a lock around forward and backward, or use stage 0."
            )

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the entries; also called when the forward raised."""
        if self.engine is not None:
            (self.engine.close if self.compiled_around is None else self.compiled_around[1])(self)

    def watch(self, module: nn.Module) -> None:
        """Make `module` an entry of this unit."""
        self._entries.append(weakref.ref(module))
        module.register_forward_pre_hook(self.before_forward, with_kwargs=True)
        module.register_forward_hook(self.after_forward, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        copy = memo[id(self)] = Unit(None, self.name, self.index)
        if self.engine is None or id(self.engine.model) not in memo or self.engine.whole_depth:
            return copy  # of a submodule, or inside whole(): its parameters are plain, so its hooks do nothing
        copy.engine = deepcopy(self.engine, memo)
        copy._entries = [weakref.ref(deepcopy(m, memo)) for m in self.entries]
        copy.flats = [deepcopy(f, memo) for f in self.flats]
        for slot in self.slots:
            if (module := slot.module()) is not None:
                copy.slots.append(Slot(deepcopy(module, memo), slot.name, deepcopy(slot.flat, memo), slot.index))
        return copy
