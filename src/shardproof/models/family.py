"""What a model family is made of, and how to find that out for a model that has no record."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from shardproof.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

CAUSAL = "AutoModelForCausalLM"  # the class of transformers that loads what writes answers
PARTS = ("llm", "vision", "audio", "aligner", "talker")
MEDIA = ("image", "audio", "video")
TALKER, UNUSED, THINKER = "talker", "unused", "thinker"
FED_BY = {"vision": ("image", "video"), "audio": ("audio",), "aligner": MEDIA}  # files that reach these parts


@dataclass(frozen=True)
class Grounding:
    """How a family writes the name of a thing in a picture, and where it is, as ms-swift's templates do.

    Attributes:
        name: with the name at `{}`.
        box: with the numbers at `{points}`, (x1,y1),(x2,y2), or at `{list}`, [x1, y1, x2, y2].
        pixels: whether they are pixels of the picture as the processor resizes it; else thousandths of its sides.
    """

    name: str
    box: str
    pixels: bool = False


@dataclass(frozen=True)
class Family:
    """One family of models, in the names of transformers' own classes. Paths are those of `named_modules()`.

    Attributes:
        name: as `shardproof models` shows it.
        model_types: what `model_type` in config.json says.
        model_class: the class of transformers that is loaded.
        parts: for each of PARTS that the family has, the modules it consists of. Where one lies in another (an aligner
            in a tower), the deeper path counts.
        blocks: the lists of repeated layers. Each layer is a unit.
        dynamic: modules that only some rows use. Each is a unit, without the layers in it.
        unused: modules whose weights no training step reaches. They are kept, saved, and never trained. Layers of a
            tower behind `vision_feature_layer` of the config are such without being named here.
        processor: the class of what turns images and sounds into tensors; none for models of text.
        media: what rows may hold besides text.
        trains: the module whose forward is trained, where it is not the model's own.
        speech: modules that are there only with audio output.
        files: what a model folder holds besides weights, config and processor.
        codes: what the talker is trained on: `one` code a step, or `groups` of codes; empty where it cannot be.
        own_code: the classes lie in the model's folder, and their code runs only where the user allows it.
        marks: what stands for a file in a text, for processors that take rows one by one and do not say where they put
            files (see `row_by_row.py`).
        takes_data: whether forward takes its inputs in one dict.
        grounding: how it writes what is where in a picture; None where ms-swift has no form of its own for it.
    """

    name: str
    model_types: tuple[str, ...]
    model_class: str
    parts: Mapping[str, tuple[str, ...]]
    blocks: tuple[str, ...]
    dynamic: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    processor: str | None = None
    media: tuple[str, ...] = ()
    trains: str = ""
    speech: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    codes: Literal["", "one", "groups"] = ""
    own_code: bool = False
    marks: Mapping[str, str] = field(default_factory=dict)
    takes_data: bool = False
    grounding: Grounding | None = None


@dataclass(frozen=True)
class Anatomy:
    """The parts of one model, as its record says or as inspection has found.

    Attributes:
        part_of: for each parameter its part, or `unused`.
        units: what `shardproof.shard` takes; None lets the engine look for itself.
        dynamic: names of the modules that only some rows use.
    """

    part_of: Mapping[str, str]
    units: list[type[nn.Module] | str] | None = None
    dynamic: list[str] = field(default_factory=list)

    @property
    def parts(self) -> list[str]:
        there = set(self.part_of.values())
        return [part for part in PARTS if part in there]


def anatomy(model: nn.Module) -> Anatomy:
    """The parts of a model, a PEFT model included: by the record of its family, or else by the names of its modules."""
    from shardproof.models.families import family_of

    inner = without_adapters(model)
    prefix = "" if inner is model else "base_model.model."  # of its names inside
    family = family_of(getattr(inner, "config", None))
    names = [name for name, _ in model.named_parameters()]
    if family is None:
        return Anatomy({name: guessed_part(name) for name in names})
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
    """The layers of a vision tower that work for nothing: those behind the last one whose output is taken as features,
    as `vision_feature_layer` of LLaVA and InternVL says (the number of a hidden state, of which there is one more)."""
    taken = getattr(config, "vision_feature_layer", None)
    towers = family.parts.get("vision", ())
    if taken is None or not towers:
        return []
    path = next(path for path in family.blocks if path.startswith(f"{towers[0]}."))
    if path not in modules:  # LLaVA's model with Pixtral's tower, whose layers have another name
        return []
    layers = [name for name, _ in modules[path].named_children()]
    states = [taken] if isinstance(taken, int) else taken
    last = max(state if state >= 0 else len(layers) + 1 + state for state in states)
    return [f"{path}.{name}" for name in layers[last:]]


def without_adapters(model: Any) -> Any:
    """The model inside a PEFT model, or the model itself."""
    # PEFT hangs a peft_config on the model inside, too.
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def divides_its_loss(model: Any) -> bool:
    """Whether the loss of a model's forward is a sum divided by `num_items_in_batch`. Trainer believes that of whatever
    takes **kwargs; some of these (Qwen2-Audio, T5, BERT, most classifiers) return the mean of the batch all the same:
    they make it themselves, or do not hand on what they were given."""
    kind: Any = type(without_adapters(model))
    return _divides(kind)


def makes_its_mean(model: Any) -> bool:
    """Whether a model's forward makes the mean cross entropy of its batch by torch's own class, as Qwen2-Audio's does:
    then it is computed of the logits, and divided by the tokens of all ranks. What else a forward makes of labels may
    have other terms, and stays the loss."""
    text = _forward_of(type(without_adapters(model)))
    return "CrossEntropyLoss(" in text and "num_items_in_batch" not in text


def _forward_of(kind: Any) -> str:
    """The code of a model's forward; nothing where there is none to read."""
    try:
        return inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return ""


@functools.cache  # a trainer asks for each micro-batch
def _divides(kind: Any) -> bool:
    text = _forward_of(kind)
    calls = re.findall(r"(?:[lL]oss|cross_entropy)\w*\(((?:[^()]|\([^()]*\))*)\)", text)
    given = any("kwargs" in call for call in calls) and "CrossEntropyLoss(" not in text
    return given or not calls or "num_items_in_batch" in text


@contextmanager
def tried(model: Any) -> Iterator[None]:
    """Inside, a model may be asked what it makes of a few tokens: in eval mode, and with gradients on. Without, the
    engine would take it for the beginning of a generation."""
    import torch

    training = model.training
    try:
        model.eval()
        with torch.enable_grad():
            yield
    finally:
        model.train(training)


def _deepest(name: str, paths: Mapping[str, str]) -> str:
    pieces = name.split(".")
    for end in range(len(pieces), 0, -1):
        part = paths.get(".".join(pieces[:end]))
        if part is not None:
            return part
    return "llm"


# Words in the path of a parameter, the more telling ones first.
_TELLING = (
    (TALKER, r"talker"),
    (UNUSED, r"token2wav|code2wav|vocoder"),
    ("aligner", r"project|merger|align|resampl|connector|adapter|mm_proj|abstractor"),
    ("audio", r"audio|speech|whisper|apm"),
    ("vision", r"vis|image|vit\b|vpm|clip|siglip|patch"),
)


def guessed_part(name: str) -> str:
    """The part that a parameter of an unknown model belongs to, by the words in its path. Blocks of a language model
    (`q_proj`, `vision_expert`) are not towers: only what stands before the first number counts."""
    path = re.split(r"\.\d+\.", name)[0].lower().rpartition(".")[0]
    outer = ".".join(piece for piece in path.split(".") if not piece.endswith(("_proj", "norm")))
    return next((part for part, words in _TELLING if re.search(words, outer)), "llm")


def trainable_parts(
    there: Iterable[str], train: Iterable[str] | None, freeze: Iterable[str], more: bool = False
) -> list[str]:
    """The parts that are trained.

    Args:
        there: the parts of the model.
        train: names of PARTS, or `thinker` for all but the talker, which is also the default.
        freeze: parts that are taken out of these, whether the model has them or not.
        more: whether something is trained besides, so that no part may be left.

    Raises:
        ConfigError: there is no such part, the model has no such part to train, or nothing is left.
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
    """Raise ConfigError for what is no part of any model, before one is looked at."""
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
        hint = " It is there with --enable-audio-output." if part == TALKER else ""
        raise ConfigError(f"{option} {part}: this model has no such part, it has {', '.join(here)}.{hint}")
