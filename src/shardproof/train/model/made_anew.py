"""Weights missing from a model's files, which are initialised at random when it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, cast

from shardproof.errors import ConfigError
from shardproof.models.scorers import HEADS

log = logging.getLogger("shardproof")

_NAMES = "made_anew"  # where a model records the weights missing from its files
SHOWN = 3


def note_made_anew(model: Any, missing: Iterable[str]) -> list[str]:
    """Record in the model which of its weights are missing from its files. Returns them, sorted."""
    names = model.__dict__[_NAMES] = sorted(missing)
    return names


def noting(how: Callable[..., Any]) -> Callable[..., Any]:
    """`how`, a loader that reads values (see `load_pretrained`), extended to record the missing weights in the model.
    Classes with their own from_pretrained, which loads more than weights, are left out: what they report is not known
    beforehand."""

    def load(kind: Any, source: str, **options: Any) -> Any:
        from transformers import PreTrainedModel

        ordinary: Any = PreTrainedModel.from_pretrained
        if issubclass(kind, PreTrainedModel) and cast("Any", kind).from_pretrained.__func__ is not ordinary.__func__:
            return how(kind, source, **options)
        model, found = how(kind, source, output_loading_info=True, **options)
        note_made_anew(model, found["missing_keys"])
        return model

    return load


def note_not_read(model: Any) -> None:
    """The same for a model whose weights are read when it is sharded. Nothing is recorded for a model that already has
    its weights."""
    from shardproof.integrations.initial import Initial
    from shardproof.zero.build import READER

    readers = {name: p.__dict__.get(READER) for name, p in model.named_parameters()}
    if any(readers.values()):
        note_made_anew(model, [name for name, read in readers.items() if read is None or isinstance(read, Initial)])


def made_anew(model: Any) -> list[str]:
    """The weights missing from the model's files, except for a head that every run initialises, and poolers, which are
    not used."""
    names = getattr(model, _NAMES, ())
    return [name for name in names if not name.startswith(HEADS) and "pooler" not in name.split(".")]


def tell_made_anew(model: Any, source: str, trained: bool = True, but: Iterable[str] = ()) -> None:
    """Warn, on the first rank, about weights that are missing from the model's files.

    Args:
        trained: whether the model is about to be trained.
        but: modules that are exempt because they are replaced.
    """
    from shardproof.zero.comm.world import is_first

    names = [name for name in made_anew(model) if not any(_within(name, f".{one}") for one in but)]
    if names and is_first():
        log.warning(
            "%d weight(s) are not in the files of %s and %s at random: %s. If they are not new to the model, these"
            " files belong to another model.",
            *(len(names), source, "begin" if trained else "were made", _some(names)),
        )


def check_kept(model: Any, modules_to_save: Iterable[str]) -> None:
    """Raise ConfigError if adapters would be trained on weights that are lost afterwards: such weights are in no file
    and differ each time they are initialised, and only adapters are saved."""
    whole = tuple(f".{name}" for name in modules_to_save)
    new = [name for name in made_anew(model) if not any(_within(name, one) for one in whole)]
    parameters = dict(model.named_parameters())
    if lost := [name for name in new if not _is_constant(parameters.get(name))]:
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in lost))
        way = f"--modules-to-save {' '.join(modules)}"
        if "" in modules:  # PEFT does not save parameters of the root module
            way = "put each of the model's own into a module, and name that in --modules-to-save"
        raise ConfigError(
            f"Adapters are trained, and {len(lost)} weight(s) are not in the model's files and begin at random"
            f" ({_some(lost)}). Only adapters are saved, and elsewhere they would be applied to other weights.\nIf"
            f" the weights are new to the model, train and save them in full: {way}. If not, name the folder of the"
            f" complete model."
        )


def _is_constant(parameter: Any) -> bool:
    """Whether it is a vector with a single value, as scales and biases are initialised: such a vector is the same each
    time. None stands for anything that is not a parameter."""
    from shardproof.zero.build import READER

    if parameter is None or parameter.ndim != 1 or parameter.numel() < 2:  # a single element may be random
        return False
    read = parameter.__dict__.get(READER)
    if read is None and parameter.is_meta:
        return False
    values = parameter.detach() if read is None else read(0, parameter.numel())
    return bool((values == values[0]).all())


def _within(name: str, module: str) -> bool:
    """Whether a parameter is in a module whose path ends in `module`, as PEFT matches it."""
    parts = name.split(".")
    return any(f".{'.'.join(parts[:end])}".endswith(module) for end in range(1, len(parts)))


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
