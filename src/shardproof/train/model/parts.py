"""Which parts of a model are trained, and how fast."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from shardproof.data.forms.parts import rows_of_kinds
from shardproof.errors import ConfigError
from shardproof.models.families.anatomy import anatomy, trainable_parts
from shardproof.models.families.family import FED_BY, PARTS, TALKER
from shardproof.models.families.known import family_of
from shardproof.models.scorers import HEADED, HEADS
from shardproof.train.model.new_blocks import train_new_alone
from shardproof.train.options.config import RunConfig
from shardproof.train.options.patterns import check_pattern

if TYPE_CHECKING:
    import torch
    from torch import nn

Config = TypeVar("Config", bound=RunConfig)
SECOND = re.compile(r"\.lora_(embedding_)?B\b")  # the second matrix of an adapter, by its PEFT name


def choose_parts(model: nn.Module, config: RunConfig) -> list[str]:
    """Freeze everything that --freeze, --train-parts and --freeze-parameters exclude. Returns the trained parts.

    Raises:
        ConfigError: the model does not have a named part or parameter, or nothing is left to train.
    """
    found = anatomy(model)
    chosen, scores = parts_trained(model, found.parts, config), _scores(model)
    family = family_of(getattr(model, "config", None))
    if TALKER in chosen and not (family is not None and family.codes):
        raise ConfigError("--train-parts talker: training the talker of this model is not supported.")
    for part in config.part_learning_rates:
        if part not in chosen and (part in found.parts or part not in PARTS):
            raise ConfigError(f"--part-learning-rates {part}=...: the trained parts are {', '.join(chosen)}.")
    for name, parameter in model.named_parameters():
        if found.part_of[name] not in chosen and not (scores and name.startswith(HEADS)):
            parameter.requires_grad_(False)
    for name in named(model, "--freeze-parameters", config.freeze_parameters):
        model.get_parameter(name).requires_grad_(False)
    for name in named(model, "--trainable-parameters", config.trainable_parameters):
        model.get_parameter(name).requires_grad_(True)
    if getattr(config, "new_blocks", 0):
        train_new_alone(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"--freeze-parameters {' '.join(config.freeze_parameters)}: nothing is left to train.")
    return chosen


def whole_parts(model: nn.Module, config: Config) -> Config:
    """The options with parts named in --modules-to-save replaced by their modules: a full tower, trained along with
    adapters. A model need not have all of `vision audio aligner`.

    Raises:
        ConfigError: one of them is frozen, or the model has none of them.
    """
    asked = [name for name in config.modules_to_save if name in PARTS]
    if not asked:
        return config
    found = anatomy(model)
    there = [part for part in asked if part in found.parts]
    if not there:
        raise ConfigError(
            f"--modules-to-save {' '.join(asked)}: this model has no such part. It has {', '.join(found.parts)}."
        )
    if frozen := [part for part in there if part not in parts_trained(model, found.parts, config)]:
        raise ConfigError(f"--modules-to-save {frozen[0]}: that part is frozen (--freeze, --train-parts).")
    names = [name for name in config.modules_to_save if name not in asked]
    return config.model_copy(update={"modules_to_save": [*names, *_modules_of(model, there, found.part_of)]})


def _modules_of(model: nn.Module, parts: Sequence[str], part_of: Mapping[str, str], path: str = "") -> list[str]:
    """The outermost modules that hold only weights of these parts; module lists are split, since PEFT cannot copy
    them."""
    from torch import nn

    own = [part_of.get(f"{path}{name}") in parts for name, _ in model.named_parameters()]
    if path and all(own) and not isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        return [path.rstrip(".")] if own else []
    children = model.named_children() if any(own) else ()
    return [found for name, child in children for found in _modules_of(child, parts, part_of, f"{path}{name}.")]


def parts_trained(model: nn.Module, parts: list[str], config: RunConfig) -> list[str]:
    """The parts of a model that are trained under --train-parts and --freeze; may be empty if something else is
    trained."""
    besides = bool(config.trainable_parameters) or (config.tuner == "full" and _scores(model))
    return trainable_parts(parts, config.train_parts, config.freeze, besides)


def _scores(model: nn.Module) -> bool:
    """Whether it has a score head, which is trained even when the language model is not."""
    return type(model).__name__.endswith(HEADED)


def freeze_head(model: Any) -> None:
    """Freeze what a model does not use to produce vectors or scores, such as its language-model head."""
    for parameter in passed_by(model):
        parameter.requires_grad_(False)


def head_for_words(model: Any) -> Any:
    """The language-model head, or None."""
    return getattr(model, "get_output_embeddings", lambda: None)()


def passed_by(model: Any) -> list[nn.Parameter]:
    """The parameters that contribute to neither vectors nor scores: those of a language-model head that is not tied to
    the embedding, and those of the pooler of a model without a head (BERT), since vectors are made from hidden
    states."""
    if model.base_model is model:
        pooler = getattr(model, "pooler", None)
        return [] if pooler is None else list(pooler.parameters())
    head, embedding = head_for_words(model), model.get_input_embeddings()
    return [] if head is None or head.weight is embedding.weight else list(head.parameters())


def check_reached(model: nn.Module, rows: Iterable[Any]) -> None:
    """Raise ConfigError if only parts fed by files are trained, and no row has such files."""
    part_of = anatomy(model).part_of
    trained = {part_of[name] for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained <= FED_BY.keys():
        return
    kinds = rows_of_kinds(rows)
    if not any(kind in kinds for part in trained for kind in FED_BY[part]):
        seen = f"the rows have files of kind {', '.join(kinds)} only" if kinds else "no row has a file"
        raise ConfigError(f"Nothing would be learned: only {', '.join(sorted(trained))} is trained, and {seen}.")


def named(model: nn.Module, option: str, patterns: Sequence[str]) -> list[str]:
    """The names of parameters that one of these regular expressions matches (re.search).

    Raises:
        ConfigError: one of them is not a regular expression, or matches no name.
    """
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if p.is_floating_point()]
    found: list[str] = []
    for pattern in patterns:
        check_pattern(option, pattern)
        matching = [name for name in names if re.search(pattern, name)]
        if not matching:
            raise ConfigError(
                f"{option} {pattern}: the model has no parameter with such a name.\nIts names look like {names[0]},"
                f" {names[len(names) // 2]} and {names[-1]}."
            )
        found += matching
    return found


def packed_already(model: str) -> ConfigError:
    return ConfigError(f"{model} is in four bits, which cannot be trained: add --tuner lora.")


def in_bits(model: Any, config: RunConfig) -> Any:
    """The model before it gets adapters, with its base in four bits if --quantize asks for it or it was saved so.

    Raises:
        ConfigError: it cannot be packed, or its own weights are to be trained.
    """
    from shardproof.integrations.four_bits import FourBitLinear, in_four_bits

    packed = any(isinstance(module, FourBitLinear) for module in model.modules())
    if packed and config.tuner == "full":
        raise packed_already(config.model)
    if config.quantize is None:
        return model
    if packed:
        raise ConfigError(f"{config.model} is in four bits already: leave --quantize out.")
    part_of, whole = anatomy(model).part_of, [f".{name}." for name in config.modules_to_save]

    def packs(name: str) -> bool:
        return part_of[name] == "llm" and not any(trained in f".{name}" for trained in whole)

    if not in_four_bits(model, config.quantize, packs):
        raise ConfigError(f"--quantize: the language model of {type(model).__name__} has no blocks of linear layers.")
    return model


def heads_of(model: nn.Module) -> list[Any]:
    inner: list[Any] = [module for module in model.modules() if hasattr(module, "get_output_embeddings")]
    return [module.get_output_embeddings() for module in inner]


def with_own_rates(
    optimizer: torch.optim.Optimizer, model: nn.Module, rates: Mapping[str, float], ratio: float
) -> None:
    """Give the parameters of these parts a learning rate of their own, and the second matrices of adapters `ratio`
    times the rate of their part (LoRA+), as additional groups that follow the same schedule."""
    part_of = anatomy(model).part_of
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in list(optimizer.param_groups):
        own: dict[float, list[torch.Tensor]] = {}
        for parameter in group["params"]:
            name = name_of.get(id(parameter), "")  # may belong to another model
            rate = rates.get(part_of.get(name, ""), group["lr"]) * (ratio if SECOND.search(name) else 1)
            own.setdefault(rate, []).append(parameter)
        group["params"] = own.pop(group["lr"], [])
        for rate, parameters in own.items():
            optimizer.add_param_group({**group, "params": parameters, "lr": rate})
