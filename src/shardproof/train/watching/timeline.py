"""The timeline of one step on one rank: what was computed, transferred and waited for, and when."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardproof.zero.autograd import in_backward
from shardproof.zero.exposed import Clock

if TYPE_CHECKING:
    from shardproof.zero.ranks.turns import Watcher
    from shardproof.zero.schedule.engine import Engine
    from shardproof.zero.units.unit import Flat, Unit

log = logging.getLogger("shardproof")

MOST = 5000  # events of each kind; generation has a forward for each token


class Timeline:
    """Watches one step of an engine, through hooks that are removed afterwards.

    Computation is tracked by the forwards of units, the gradients that arrive at their outputs, and the optimizer's
    step: the backward of a unit lasts until its gradients are handed over, or the next one begins.

    Args:
        engine: the engine of the trained model.
        optimizer: the torch optimizer that updates the model.
    """

    def __init__(self, engine: Engine, optimizer: Any) -> None:
        self.engine, self.optimizer, self.rank = engine, optimizer, engine.comm.rank
        self.watcher: Watcher | None = None  # the previous watcher, restored afterwards
        self.clock = Clock(engine.comm.device)
        self.computed: list[tuple[str, str, Any, Any]] = []  # kind, unit, from, to
        self.moved: list[tuple[str, str, int, Any, Any, Any]] = []  # kind, unit, bytes, wanted, waited from, taken
        self.met: list[tuple[str, Any, Any]] = []  # what for, from, to
        self._handles: list[Any] = []
        self._wanted: dict[int, deque[tuple[str, int, Any]]] = defaultdict(deque)
        self._doing: list[tuple[str, str]] = []  # current forwards, innermost last
        self._backward: tuple[str, str] | None = None
        self._now: tuple[str, str] | None = None
        self._since: Any = None

    def begin(self, step: int) -> None:
        self.step, self.at = step, time.time()
        for unit in self.engine.units:
            for module in [self.engine.model] if unit.is_root else unit.entries:
                self._handles += self._hooks(unit, module)
        self._handles += [
            self.optimizer.register_step_pre_hook(lambda *_: self._enter("update", "")),
            self.optimizer.register_step_post_hook(lambda *_: self._leave()),
        ]
        self.watcher, self.engine.watcher = self.engine.watcher, self
        self.started = self._since = self.clock.mark()

    def _hooks(self, unit: Unit, module: torch.nn.Module) -> list[Any]:
        def before(module: torch.nn.Module, args: Any) -> None:
            outermost = "forward" if torch.is_grad_enabled() else "inference"
            kind = self._doing[-1][0] if self._doing else outermost  # reentrant checkpointing: no gradients
            self._enter("recompute" if in_backward() else kind, unit.name)

        def after(module: torch.nn.Module, args: Any, output: Any) -> None:
            self._leave()
            tensor = _first_with_gradient(output)
            if tensor is not None:
                tensor.register_hook(lambda gradient: self._begin_backward(unit.name))

        if "torch._dynamo" in sys.modules:  # otherwise a compiled block traces its hooks, and no time is recorded
            before, after = torch.compiler.disable(before), torch.compiler.disable(after)
        # After the engine has gathered, and before it releases.
        return [module.register_forward_pre_hook(before), module.register_forward_hook(after, prepend=True)]

    # --- what is computed ------------------------------------------------------------------------

    def _turn_to(self, now: tuple[str, str] | None) -> None:
        mark = self.clock.mark()
        if self._now is not None and len(self.computed) < MOST:
            self.computed.append((*self._now, self._since, mark))
        self._now, self._since = now, mark

    def _enter(self, kind: str, unit: str) -> None:
        if kind != "recompute":
            self._backward = None
        self._doing.append((kind, unit))
        self._turn_to(self._doing[-1])

    def _leave(self) -> None:
        if self._doing:
            self._doing.pop()
        self._turn_to(self._doing[-1] if self._doing else self._backward)

    def _begin_backward(self, unit: str) -> None:
        if self.started is None:  # a graph that outlives the step
            return
        self._doing.clear()  # a recomputation that was cut short
        self._backward = ("backward", unit)
        self._turn_to(self._backward)

    # --- what the engine tells -------------------------------------------------------------------

    def wanted(self, flat: Flat, operation: int) -> None:
        if self.watcher is not None:
            self.watcher.wanted(flat, operation)
        reduces = operation % 2 == 1
        dtype = flat.grad_dtype if reduces else flat.dtype
        self._wanted[operation].append((flat.unit.name, flat.numel * dtype.itemsize, self.clock.mark()))
        if reduces and self._backward == ("backward", flat.unit.name):
            self._backward = None
            self._turn_to(None)

    @contextmanager
    def waits(self, operation: int) -> Iterator[None]:
        begin = self.clock.mark()
        with nullcontext() if self.watcher is None else self.watcher.waits(operation):
            yield
        if self._wanted[operation] and len(self.moved) < MOST:
            unit, size, wanted = self._wanted[operation].popleft()
            kind = "reduce" if operation % 2 else "gather"
            self.moved.append((kind, unit, size, wanted, begin, self.clock.mark()))

    @contextmanager
    def meets(self, what: str) -> Iterator[None]:
        self._backward = None
        if not self._doing:
            self._turn_to(None)
        begin = self.clock.mark()
        with nullcontext() if self.watcher is None else self.watcher.meets(what):
            yield
        if len(self.met) < MOST:
            self.met.append((what, begin, self.clock.mark()))

    # --- the end ---------------------------------------------------------------------------------

    def end(self, file: Path) -> None:
        """Stop watching, and write the events, with times in seconds since the step began."""
        self._doing, self._backward = [], None
        self._turn_to(None)
        self.engine.watcher = self.watcher
        for handle in self._handles:
            handle.remove()
        start, self.started = self.started, None

        def second(mark: Any) -> float:
            return round(self.clock.seconds(start, mark), 6)

        told = {
            "step": self.step,
            "rank": self.rank,
            "at": self.at,
            "seconds": second(self._since),
            "computed": [[*what, second(a), second(b)] for *what, a, b in self.computed],
            "moved": [[*what, second(a), second(b), second(c)] for *what, a, b, c in self.moved],
            "met": [[what, second(a), second(b)] for what, a, b in self.met],
            "cut": max(len(self.computed), len(self.moved), len(self.met)) >= MOST,
        }
        try:
            file.write_text(json.dumps(told, separators=(",", ":")) + "\n", encoding="utf-8")
        except OSError as error:  # such as a full disk: a timeline is not worth ending a run
            with suppress(OSError):
                file.unlink()
            log.warning("%s cannot be written: %s", file, error.strerror or error)


def _first_with_gradient(output: Any) -> torch.Tensor | None:
    """The first tensor of an output that will receive a gradient."""
    if isinstance(output, torch.Tensor):
        return output if output.requires_grad else None
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return next((found for part in parts if (found := _first_with_gradient(part)) is not None), None)
