"""The parts of a model: the part of each parameter, and which parts are trained."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardproof.errors import ConfigError
from shardproof.models.families.family import PARTS, TALKER, THINKER, UNUSED, Family
from shardproof.models.families.known import family_of
from shardproof.models.forward import without_adapters

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model, from its record or found by inspection.

    Attributes:
        part_of: the part of each parameter, or `unused`.
        units: the units for `shardproof.shard`; None lets the engine choose.
        dynamic: names of modules that only some rows use.
    """

    part_of: Mapping[str, str]
    units: list[type[nn.Module] | str] | None = None
    dynamic: list[str] = field(default_factory=list)

    @property
    def parts(self) -> list[str]:
        there = set(self.part_of.values())
        return [part for part in PARTS if part in there]


def anatomy(model: nn.Module) -> Anatomy:
    """The parts of a model (also a PEFT model): by the record of its family, or else by the names of its modules."""
    inner = without_adapters(model)
    prefix = "" if inner is model else "base_model.model."  # of the names inside
    family = family_of(getattr(inner, "config", None))
    names = [name for name, _ in model.named_parameters()]
    if family is None:
        towers = _towers(inner)
        tops = {name: _top(name.removeprefix(prefix), towers) for name in names}
        return Anatomy({name: guessed_part(name, towers.get(top or "")) for name, top in tops.items()})
    paths = {path: part for part, found in family.parts.items() for path in found}
    modules = dict(inner.named_modules())
    paths |= dict.fromkeys((*family.unused, *_behind_features(family, inner.config, modules)), UNUSED)
    dynamic = [path for path in family.dynamic if path in modules]
    layers = {type(layer) for path in family.blocks if path in modules for layer in modules[path].children()}
    return Anatomy(
        {name: _deepest(name.removeprefix(prefix), paths) for name in names},
        [*sorted(layers, key=str), *(prefix + path for path in dynamic)],
        [prefix + path for path in dynamic],
    )


def _behind_features(family: Family, config: Any, modules: Mapping[str, nn.Module]) -> list[str]:
    """The layers of a vision tower after the last one whose output is used as features, according to
    `vision_feature_layer` of LLaVA and InternVL (the index of a hidden state, of which there is one more)."""
    taken = getattr(config, "vision_feature_layer", None)
    towers = family.parts.get("vision", ())
    if taken is None or not towers:
        return []
    path = next(path for path in family.blocks if path.startswith(f"{towers[0]}."))
    if path not in modules:  # LLaVA with Pixtral's tower, whose layers have another name
        return []
    layers = [name for name, _ in modules[path].named_children()]
    states = [taken] if isinstance(taken, int) else taken
    last = max(state if state >= 0 else len(layers) + 1 + state for state in states)
    return [f"{path}.{name}" for name in layers[last:]]


def _deepest(name: str, paths: Mapping[str, str]) -> str:
    pieces = name.split(".")
    for end in range(len(pieces), 0, -1):
        part = paths.get(".".join(pieces[:end]))
        if part is not None:
            return part
    return "llm"


# Words in the path of a parameter, the more specific ones first.
_TELLING = (
    (TALKER, r"talker"),
    (UNUSED, r"token2wav|code2wav|vocoder"),
    ("aligner", r"project|merger|align|resampl|connector|adapter|mm_proj|abstractor"),
    ("audio", r"audio|speech|whisper|apm"),
    ("vision", r"vis|image|vit\b|vpm|clip|siglip|patch|\bvq"),
)
_OF_PATCHES = re.compile(r"(patch|subsampl)\w*?[._]projection")  # the input of a tower, not an aligner


def guessed_part(name: str, tower: str | None = None) -> str:
    """The part of a parameter in an unknown model, by the words in its path. Blocks of a language model (`q_proj`,
    `vision_expert`) are not towers: only the path before the first number counts.

    Args:
        tower: the part, if the parameter is in a tower that transformers declares.
    """
    path, numbered = re.subn(r"\.\d+\..*", "", name.lower())
    path = _OF_PATCHES.sub(r"\1", path if numbered else path.rpartition(".")[0])
    outer = ".".join(piece for piece in path.split(".") if not piece.endswith(("_proj", "norm")))
    return next((part for part, words in _TELLING if re.search(words, outer)), tower or "llm")


def _towers(model: Any) -> dict[str, str]:
    """The outermost modules that take files but no text, as declared by their transformers classes, and their parts:
    not all are named after their input (`encoder`, `vqmodel`)."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        taken = getattr(module, "input_modalities", None) or ()
        kinds = {taken} if isinstance(taken, str) else set(taken)
        if name and kinds and kinds <= {"image", "video", "audio"} and _top(name, found) is None:
            found[name] = "vision" if kinds & {"image", "video"} else "audio"
    return found


def _top(name: str, towers: Mapping[str, str]) -> str | None:
    return next((tower for tower in towers if name.startswith(f"{tower}.")), None)


def trainable_parts(
    there: Iterable[str], train: Iterable[str] | None, freeze: Iterable[str], more: bool = False
) -> list[str]:
    """The parts that are trained.

    Args:
        there: the parts of the model.
        train: names from PARTS, or `thinker` for all but the talker, which is also the default.
        freeze: parts to exclude, whether or not the model has them.
        more: whether something else is trained, so that the list may be empty.

    Raises:
        ConfigError: there is no such part, the model lacks a part to train, or nothing is left.
    """
    here, freeze = list(there), list(freeze)
    thinker = [part for part in here if part != TALKER]
    wanted: set[str] = set()
    for part in train if train is not None else [THINKER]:
        _check_part(part, here, "--train-parts", (THINKER,))
        wanted.update(thinker if part == THINKER else [part])
    for part in freeze:
        _check_part(part, PARTS, "--freeze")
    left = [part for part in here if part in wanted and part not in freeze]
    if not left and not more:
        raise ConfigError(f"--freeze {' '.join(freeze)} leaves nothing to train: the model has {', '.join(here)}.")
    return left


def check_part_names(train: Iterable[str], freeze: Iterable[str], rates: Iterable[str]) -> None:
    """Raise ConfigError for names that are not parts of any model, before looking at one."""
    for option, parts, more in (
        ("--train-parts", train, (THINKER,)),
        ("--freeze", freeze, ()),
        ("--part-learning-rates", rates, ()),
    ):
        for part in parts:
            _check_part(part, PARTS, option, more)


def _check_part(part: str, here: Sequence[str], option: str, more: tuple[str, ...] = ()) -> None:
    if part not in (*PARTS, *more):
        raise ConfigError(f"{option} {part}: the parts are {', '.join((*PARTS, *more))}.")
    if part not in (*here, *more):
        hint = " It exists with --enable-audio-output." if part == TALKER else ""
        raise ConfigError(f"{option} {part}: this model has no such part, it has {', '.join(here)}.{hint}")


def language_layers(model: Any) -> list[tuple[str, Any]]:
    """The layers of the language model, by name: the longest module list whose weights all belong to the model
    itself."""
    from torch import nn

    part_of, lists = anatomy(model).part_of, []
    for path, module in model.named_modules():
        names = [f"{path}.{name}" for name, _ in module.named_parameters()] if isinstance(module, nn.ModuleList) else []
        if names and all(part_of.get(name) == "llm" for name in names):
            lists.append([(f"{path}.{at}", layer) for at, layer in enumerate(module)])
    return max(lists, key=len, default=[])
