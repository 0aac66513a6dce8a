"""Weights that a model folder lacks are initialised as in transformers, but never all at once: module by module, and
again when a rank reads its range.

[Note: initialised twice]
An initial value depends on all random numbers drawn before it. So the modules are initialised in transformers' order;
the values of each are dropped, but the random state before it is kept, from which the same values can be produced when
they are needed. Some modules write into their submodules (GPT-2's attention scales its projection): these are
initialised together.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardproof.zero.build import READER

log = logging.getLogger("shardproof")

DONE = "_is_hf_initialized"  # transformers' mark on modules and tensors that are initialised
Steps = list[tuple[nn.Module, Any]]  # modules in order of initialisation, each with the model that initialises it


class _ReachesOut(Exception):
    """A module's initialisation uses the values of another one."""


class _OnlyOwn(TorchDispatchMode):
    """Inside, computing with tensors without values raises `_ReachesOut`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(value, torch.Tensor) and value.is_meta for value in tree_leaves((args, kwargs))):
            raise _ReachesOut
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Together:
    """Modules that are initialised one after the other, starting from the random state `state`.

    Attributes:
        lacking: for each, the shapes and dtypes of its parameters that the files lack.
    """

    steps: Sequence[tuple[nn.Module, Any]]
    lacking: Sequence[dict[str, tuple[torch.Size, torch.dtype]]]
    state: torch.Tensor

    def values(self) -> dict[tuple[int, str], nn.Parameter]:
        """The initial values, by module id and name in the module. The random state continues from `state`."""
        from transformers.initialization import guard_torch_init_functions

        made = {
            (id(module), name): nn.Parameter(_apart(shape, dtype), dtype.is_floating_point)
            for (module, _), lacking in zip(self.steps, self.lacking, strict=True)
            for name, (shape, dtype) in lacking.items()
        }
        before = [module._parameters for module, _ in self.steps]
        torch.set_rng_state(self.state)
        try:
            for module, _ in self.steps:
                own = {name: made.get((id(module), name), p) for name, p in module._parameters.items()}
                module._parameters = own
            with torch.no_grad(), guard_torch_init_functions():
                for module, owner in self.steps:
                    owner._init_weights(module)
        finally:
            for (module, _), parameters in zip(self.steps, before, strict=True):
                module._parameters = parameters
        return made


def _apart(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in separate pages, which return to the system with them. In the heap, the random states that are kept would
    occupy the place of dropped values, in which the next values would no longer fit."""
    size = shape.numel() * dtype.itemsize
    if size < mmap.PAGESIZE:
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


@dataclass(frozen=True)
class Initial:
    """Reads a range of a parameter's initial values."""

    together: Together
    key: tuple[int, str]

    def __call__(self, first: int, last: int) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            return self.together.values()[self.key].detach().reshape(-1)[first:last]


def initialise(model: Any) -> bool:
    """Give parameters on the meta device that no file holds readers of their initial values; initialise buffers.

    The random state is that of the first rank, and continues as after `initialize_weights`. Collective, unless nothing
    is missing.

    Returns: whether it was done; if not, nothing has changed, and the full model has to be initialised.
    """
    if not any(_lacking(module) for module in model.modules()):
        return False
    if model.is_custom_code() or any(map(nn.utils.parametrize.is_parametrized, model.modules())):
        return _whole(model)
    with _same_random_numbers():
        begin = torch.get_rng_state()
        steps: Steps = []
        try:
            with _OnlyOwn():
                _visit(model, model, steps, set(model._no_split_modules or ()))
        except _ReachesOut:
            torch.set_rng_state(begin)
            for module, _ in steps:
                delattr(module, DONE)
                for name in _lacking(module):
                    module._parameters[name].__dict__.pop(READER, None)
            return _whole(model)
    return True


def _whole(model: Any) -> bool:
    log.warning("The weights that the files of %s lack are initialised in full on every rank.", type(model).__name__)
    return False


def _visit(module: nn.Module, owner: Any, steps: Steps, blocks: set[str]) -> None:
    """Initialise the submodules, then the module, and add them to `steps`, in transformers' order."""
    from transformers import PreTrainedModel

    begin, count = torch.get_rng_state(), len(steps)
    for child in module.children():
        _visit(child, child if isinstance(child, PreTrainedModel) else owner, steps, blocks)
    if getattr(module, DONE, False):
        return
    steps.append((module, owner))
    setattr(module, DONE, True)
    try:
        _give_readers(steps[-1:], torch.get_rng_state())
    except _ReachesOut:
        if any(type(inside).__name__ in blocks for inside in module.modules() if inside is not module):
            raise  # all blocks at once would take too much memory
        _give_readers(steps[count:], begin)


def _give_readers(steps: Steps, state: torch.Tensor) -> None:
    together = Together(tuple(steps), [_lacking(module) for module, _ in steps], state)
    together.values()
    for module, _ in steps:
        for name in _lacking(module):
            setattr(module._parameters[name], READER, Initial(together, (id(module), name)))


def _lacking(module: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The module's own parameters that no file holds."""
    found = {name: p for name, p in module._parameters.items() if p is not None and p.is_meta}
    return {name: (p.shape, p.dtype) for name, p in found.items() if not getattr(p, DONE, False)}


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Inside, every rank draws the same numbers as the first. A rank with another random state gets it back
    afterwards."""
    own = torch.get_rng_state()
    first = [own]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(first)
    torch.set_rng_state(first[0])
    yield
    if not torch.equal(first[0], own):
        torch.set_rng_state(own)
