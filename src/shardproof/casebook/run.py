"""`Run`: the interface for a case's script. It hides how each engine prepares, runs backward and steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from shardproof.casebook.case import Case
    from shardproof.casebook.engines import Engine


class Key(NamedTuple):
    """Where a recorded value belongs: a step, and a micro-batch of a rank if it was recorded inside one."""

    what: str
    step: int | None = None
    rank: int | None = None
    part: int | None = None

    def __str__(self) -> str:
        place = [f"{name} {value}" for name, value in zip(self._fields[1:], self[1:], strict=True) if value is not None]
        return ", ".join([self.what, *place])


class Run:
    """One case under one engine, on one rank.

    In one process the script iterates over the micro-batches of all `world` ranks and takes the mean of their losses:
    this is the expected result on the ranks.

    Attributes:
        model: the model as returned by the engine; call it as usual. `models` has all of them by name.
        module: the user's own module inside it (the same object with an engine that does not wrap).
        options: the remedy of this run.
        folder: a folder that all ranks share.
    """

    def __init__(self, case: Case, engine: Engine, world: int, folder: Path, options: Mapping[str, Any]) -> None:
        self.case, self.engine, self.world, self.folder, self.options = case, engine, world, folder, options
        self.ranks = [engine.rank] if engine.world > 1 else list(range(world))
        self.at = Key("")
        self.found: dict[Key, Any] = {}
        self.models: dict[str, Any] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}

    # --- life ---

    def play(self) -> dict[Key, Any]:
        """Build, train, and return everything recorded."""
        torch.manual_seed(7 + (self.engine.rank if self.case.seed_by_rank else 0))
        built = self.case.model()
        self.prepare(built if isinstance(built, dict) else {"": built})
        self.case.train(self)
        self.at = Key("")
        if self.case.weights:
            for name in self.models:
                for key, value in self.state(name).items():
                    self.record(f"weights of {name}{'.' if name else ''}{key}", value)
        return self.found

    def prepare(self, models: dict[str, nn.Module]) -> None:
        """Hand models to the engine, replacing those with the same names, if any."""
        for name, model in models.items():
            trains = any(p.requires_grad for p in model.parameters())
            make = self.case.optimizer if trains else None
            self.models[name], optimizer = self.engine.prepare(model, make)
            if optimizer is not None:
                self.optimizers[name] = optimizer

    @property
    def model(self) -> Any:
        return self.models[next(iter(self.models))]

    @property
    def module(self) -> Any:
        return self.engine.bare(self.model)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optimizers[next(iter(self.optimizers))]

    # --- the loop ---

    def steps(self, count: int) -> Iterator[int]:
        for k in range(count):
            self.at = Key("", k)
            yield k

    def parts(self) -> Iterator[Any]:
        """The micro-batches of this step. The random state is reset for each, identically in one process and on
        ranks."""
        step = self.at.step or 0
        for rank in self.ranks:
            for number, part in enumerate(self.case.batches(step, rank)):
                if number and self.engine.world > 1:
                    for name in self.optimizers:
                        self.engine.next_part(self.models[name])
                self.at = Key("", step, rank, number)
                torch.manual_seed(1000 * step + 10 * rank + number)
                yield part
        self.at = Key("", step)

    def everywhere(self, count: Callable[[Any], float]) -> float:
        """The sum of `count(part)` over the micro-batches of this step on all ranks."""
        batches = [self.case.batches(self.at.step or 0, rank) for rank in range(self.world)]
        return sum(count(part) for parts in batches for part in parts)

    def backward(self, loss: Tensor, *, retain_graph: bool = False, model: str = "") -> None:
        """Backward of this rank's loss. The step is taken with the mean over ranks."""
        model = model or next(iter(self.optimizers))
        self.engine.backward(self.models[model], loss / (self.world // self.engine.world), retain_graph)

    def step(self, *, look: bool = True) -> None:
        """Clip, optimizer step, gradients to none. Records the gradient norm, unless `look` is False."""
        for name in self.optimizers:
            norm = self.engine.step(self.models[name], self.optimizers[name])
            if look:
                self.record(f"gradient norm {name}".strip(), norm)

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        """For all micro-batches of a step but the last, if users defer reduction."""
        return self.engine.no_sync(self.model)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """For use around the forward pass of a case in bfloat16."""
        return self.engine.precision()

    def join(self) -> contextlib.AbstractContextManager[Any]:
        """For use around a loop in which ranks have unequal numbers of batches."""
        return self.engine.join([self.models[name] for name in self.optimizers])

    def gathered(self, parameters: Any, *, edit: bool = False) -> contextlib.AbstractContextManager[Any]:
        """For use around code that reads or edits parameters: the engine's documented context, if the remedy asks for
        it."""
        if not self.options.get("gather"):
            return contextlib.nullcontext()
        return self.engine.gathered(list(parameters), edit)

    def read(self, parameter: nn.Parameter) -> Tensor:
        """A parameter for computations outside its module's forward."""
        return self.engine.read(parameter)

    # --- whole weights ---

    def state(self, name: str = "") -> dict[str, Tensor]:
        """Full parameters by name, in master precision."""
        return self.engine.state(self.models[name or next(iter(self.models))])

    def load(self, state: dict[str, Tensor]) -> None:
        """Load full parameters, all or some, in the engine's documented way."""
        self.engine.load(self.model, state)

    def wait(self) -> None:
        """Wait until every rank is here."""
        self.engine.wait()

    # --- what comes out ---

    def record(self, what: str, value: Any) -> None:
        """Record a value for comparison: a tensor, or anything that can be tested for equality."""
        kept = torch.as_tensor(value).detach().clone() if isinstance(value, (Tensor, float, int)) else value
        key = self.at._replace(what=what)
        if key in self.found:
            raise ValueError(f"{key} is recorded twice")
        self.found[key] = kept
