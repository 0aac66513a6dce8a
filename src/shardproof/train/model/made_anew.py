"""Weights that the files of a model lack, and that are made at random when it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, cast

from shardproof.errors import ConfigError
from shardproof.models.scorers import HEADS

log = logging.getLogger("shardproof")

_NAMES = "made_anew"  # what a model is told that it was loaded without
SHOWN = 3


def note_made_anew(model: Any, missing: Iterable[str]) -> list[str]:
    """Have the model know which of its weights its files lack. Returns them, sorted."""
    names = model.__dict__[_NAMES] = sorted(missing)
    return names


def noting(how: Callable[..., Any]) -> Callable[..., Any]:
    """`how`, which loads a model with its values (see `load_pretrained`), after which the model knows that. Not of
    classes that load more than weights by themselves: what they say of these is not known before they do."""

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
    """The same of a model whose weights are read when it is sharded: those that lie in no file. Of a model that has its
    weights already it is not known any more."""
    from shardproof.integrations.initial import Initial
    from shardproof.zero.build import READER

    readers = {name: p.__dict__.get(READER) for name, p in model.named_parameters()}
    if any(readers.values()):
        note_made_anew(model, [name for name, read in readers.items() if read is None or isinstance(read, Initial)])


def made_anew(model: Any) -> list[str]:
    """The weights that the model's files lack, but for a head that every run makes, and poolers, which are not used."""
    names = getattr(model, _NAMES, ())
    return [name for name in names if not name.startswith(HEADS) and "pooler" not in name.split(".")]


def tell_made_anew(model: Any, source: str, trained: bool = True, but: Iterable[str] = ()) -> None:
    """Warn, on the first rank, of weights that are not the model's.

    Args:
        trained: whether they are about to be.
        but: modules of which this is no matter, as they are replaced.
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
    """Raise ConfigError where adapters would be trained beside weights that nobody has afterwards: they lie in no file,
    are other ones whenever they are made, and only adapters are saved."""
    whole = tuple(f".{name}" for name in modules_to_save)
    new = [name for name in made_anew(model) if not any(_within(name, one) for one in whole)]
    parameters = dict(model.named_parameters())
    if lost := [name for name in new if not _is_constant(parameters.get(name))]:
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in lost))
        way = f"--modules-to-save {' '.join(modules)}"
        if "" in modules:  # PEFT saves no parameter of the model itself
            way = "put each of the model's own into a module, and name that in --modules-to-save"
        raise ConfigError(
            f"Adapters are trained, and {len(lost)} weight(s) are not in the model's files and begin at random"
            f" ({_some(lost)}). Only adapters are saved, and elsewhere they would be applied to other weights.\nIf"
            f" the weights are new to the model, train and save them in full: {way}. If not, name the folder of the"
            f" complete model."
        )


def _is_constant(parameter: Any) -> bool:
    """Whether it is a vector of one number, as scales and biases begin: such a one is made again as it was. None is
    what is no parameter."""
    from shardproof.zero.build import READER

    if parameter is None or parameter.ndim != 1 or parameter.numel() < 2:  # one value alone may have been drawn
        return False
    read = parameter.__dict__.get(READER)
    if read is None and parameter.is_meta:
        return False
    values = parameter.detach() if read is None else read(0, parameter.numel())
    return bool((values == values[0]).all())


def _within(name: str, module: str) -> bool:
    """Whether a parameter is of a module whose path ends so, as PEFT looks for it."""
    parts = name.split(".")
    return any(f".{'.'.join(parts[:end])}".endswith(module) for end in range(1, len(parts)))


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
