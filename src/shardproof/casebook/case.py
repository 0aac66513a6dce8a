"""The definition of a case, and the list of cases."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from shardproof.casebook import cases
from shardproof.casebook.models import adamw, numbers, plain
from shardproof.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import torch

    from shardproof.casebook.run import Run

PEERS = ("ddp", "fsdp2", "deepspeed-1", "deepspeed-2", "deepspeed-3")
ZERO = PEERS[2:]
TOLERANCE = 1e-5  # relative, in fp32: the effect of another order of sums, far below any real mistake

# The five founding cases; the others follow in the order of their class.
FIRST = (
    "dummy_loss_over_unused_adapter",
    "reentrant_checkpoint_of_shared_block",
    "backward_in_eval_mode",
    "talker_loaded_elsewhere",
    "grpo_with_reentrant_checkpointing",
)


@dataclass(frozen=True)
class Remedy:
    """A setting that the documentation of a peer gives for a case. The case runs without it and with it.

    Args:
        name: the user's code, as shown in the table.
        engines: the engines it is for: `ddp`, `fsdp2`, `deepspeed-1`, `deepspeed-2`, `deepspeed-3`.
        options: the options for the engine's adapter or the case's script.
    """

    name: str
    engines: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """A program as users write it, which fails in public threads.

    The expected results are those of one process that sees the micro-batches of all ranks: every value the script
    records, the global gradient norm of every step, and the full weights at the end.

    Args:
        users: what users do, in one line.
        classes: numbers of the failure classes (`shardproof cases --list` shows them).
        threads: public threads, as `owner/repo#number`.
        model: builds the model, or several by name. The seed is set beforehand.
        train: the script.
        loss: the loss of one micro-batch, for scripts that are the plain loop.
        batches: the micro-batches of a rank in a step.
        optimizer: creates the optimizer of each model with trainable parameters.
        clip: maximum of the gradient norm; None for no clipping.
        accumulation: micro-batches per step, if every rank has the same number.
        diverges: whether ranks take different paths.
        bf16: whether to compute in bfloat16, with float32 master weights.
        seed_by_rank: whether each rank builds the model from another seed; the values of rank 0 count.
        weights: whether to compare the full weights at the end.
        tolerance: largest relative error that counts as equal.
        needs: packages beyond torch.
        remedies: settings that peers document.
        not_for: engines for which the case cannot be written, with the reason.
    """

    users: str
    classes: tuple[int, ...]
    threads: tuple[str, ...]
    model: Callable[[], nn.Module | dict[str, nn.Module]]
    train: Callable[[Run], None] = plain
    loss: Callable[[Run, Any], torch.Tensor] | None = None
    batches: Callable[[int, int], list[Any]] = numbers
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    clip: float | None = 1.0
    accumulation: int = 1
    diverges: bool = False
    bf16: bool = False
    seed_by_rank: bool = False
    weights: bool = True
    tolerance: float = TOLERANCE
    needs: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    not_for: Mapping[str, str] = field(default_factory=dict)

    def missing(self) -> list[str]:
        """Required packages that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]

    def options(self, setting: str | None) -> Mapping[str, Any]:
        """The options of the remedy named `setting`; empty without one."""
        return next((r.options for r in self.remedies if r.name == setting), {})

    def settings(self, engine: str) -> list[str | None]:
        """The settings to run on an engine: none (None), then each remedy for it."""
        return [None, *(r.name for r in self.remedies if engine in r.engines)]


@functools.cache
def all_cases() -> dict[str, Case]:
    """Every case by name, the founding five first."""
    names = [module.name for module in pkgutil.iter_modules(cases.__path__)]
    found = {name: importlib.import_module(f"{cases.__name__}.{name}").CASE for name in names}
    rest = sorted((name for name in found if name not in FIRST), key=lambda n: (found[n].classes or (99,), n))
    return {name: found[name] for name in [*FIRST, *rest]}


def case_named(name: str) -> Case:
    """The case with this name, or of the user's module with this import path, which defines `CASE`.

    Raises:
        ConfigError: there is none.
    """

    if "." in name:
        try:
            return importlib.import_module(name).CASE
        except (ModuleNotFoundError, AttributeError) as error:
            raise ConfigError(f"{name} is not a module with a CASE: {error}.") from error
    if name not in all_cases():
        hint = did_you_mean(name, all_cases())
        raise ConfigError(f"There is no case {name!r}.{hint}\n'shardproof cases --list' shows them all.")
    return all_cases()[name]
