"""Where adapters go: the linear layers and expert tensors that --target-modules and --target-parameters select.

transformers 5 keeps the experts of a mixture in one tensor per layer, and PEFT maps the names of their projections to
those tensors: `gate_proj` becomes `experts.gate_up_proj`. It does so for every layer with such a name, so that shared
experts and dense layers get no adapters, names meant for other parts put adapters on the experts, and a regular
expression no longer tells layers apart. So PEFT is asked what it would do, and each target is then given under a name
that PEFT leaves alone: a layer that it would not find is named by its weight.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardproof.errors import ConfigError, did_you_mean
from shardproof.models.families.anatomy import anatomy
from shardproof.models.scorers import HEADS
from shardproof.train.model.loading import first_line
from shardproof.train.options.config import RunConfig
from shardproof.train.options.patterns import whole_names
from shardproof.train.options.tuners import LN_TUNING, LORA

log = logging.getLogger("shardproof")

ALL = ["all-linear"]
# Names of the experts' separate projections in model files.
PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
# Linear layers in transformers with other inputs or outputs: scores and choices, or one part per matrix.
OTHERS = re.compile(r"(Router|GroupedLinear)$")
BEHIND_LAYERS = re.compile(r".*\.\d+\.(?=[^\d])")


@dataclass(frozen=True)
class Places:
    """Where adapters go, in terms of PEFT's `LoraConfig`.

    Attributes:
        modules: `target_modules`, names of modules or a regular expression.
        parameters: `target_parameters`, names of matrices and of the experts' stacked matrices.
        ranks, alphas: `rank_pattern` and `alpha_pattern`: a tensor that holds two projections gets twice the rank.
        read: the names among --target-modules that PEFT reads as experts.
    """

    modules: str | list[str]
    parameters: list[str]
    ranks: dict[str, int] = field(default_factory=dict)
    alphas: dict[str, float] = field(default_factory=dict)
    read: frozenset[str] = frozenset()


def places_of(model: Any, config: RunConfig, parts: Sequence[str]) -> Places:
    """Where new adapters go in this model under these options.

    Args:
        parts: the trained parts: towers and talkers have layers with the same names as the language model.

    Raises:
        ConfigError: a target names only one of two projections that share a tensor, a parameter that the model does not
            have, a module that is not a layer, or only modules in untrained parts.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    every = config.target_modules == ALL
    given = ALL[0] if every else whole_names(config.target_modules) or config.target_modules
    whole = config.modules_to_save
    in_general = _all_norms if config.tuner == LN_TUNING else _all_linear
    reached = in_general(model, parts) if every else _reached(LoraConfig(target_modules=given), model)
    idle = _Idle(model, parts)
    asked = [name for name in reached if not _within(name, whole) and not idle.module(name)]
    _check_parameters(model, config.target_parameters, asked, whole)
    modules, parameters = ([name for name, _ in of] for of in (model.named_modules(), model.named_parameters()))
    if config.tuner != LORA:  # other adapters only go on modules, each given by name
        idle.check_left(asked, reached, config)
        if config.tuner != LN_TUNING:
            _check_layers(model, asked, config)
        return Places(_short(asked, modules), [])
    stacks = _stacks_given(model, config, idle, parameters)
    probe = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=given)
    before = probe.target_modules
    try:
        convert_peft_config_for_transformers(probe, model, None)
    except ValueError as error:
        raise ConfigError(f"--target-modules {' '.join(config.target_modules)}: {first_line(error)}") from error
    if not probe.target_parameters and probe.target_modules == before:
        idle.check_left([*asked, *stacks], reached, config)
        _check_layers(model, asked, config)
        found = linear_layers(model, parts) if every else given
        return Places(found if asked == reached else _short(asked, modules), stacks)
    still = set(_reached(probe, model))
    _check_layers(model, [name for name in asked if name in still], config)
    lost = [name for name in asked if name not in still]
    _check_bits(model, lost, config)
    experts = [
        name
        for name in _named(model, probe.target_parameters)
        if not idle.parameter(name)
        and (every or _asks_for(name, given))
        and not _within(name.rpartition(".")[0], whole)
    ]
    idle.check_left([*asked, *stacks, *experts], reached, config)
    weights = [*experts, *(f"{name}.weight" for name in lost if f"{name}.weight" in parameters)]
    short = _short(weights, parameters)
    return Places(
        _short([name for name in asked if name in still], modules),
        list(dict.fromkeys([*stacks, *short])),
        probe.rank_pattern,
        probe.alpha_pattern,
        frozenset(t for t in config.target_modules if any(_asks_for(name, [t]) for name in experts)),
    )


class _Idle:
    """What lies in untrained parts of a model."""

    def __init__(self, model: Any, parts: Sequence[str]) -> None:
        self._model, self._parts, self._part_of = model, parts, anatomy(model).part_of

    def parameter(self, name: str) -> bool:
        """Whether this parameter (a tied one under its first name) is in an untrained part. Score heads never are."""
        return self._part_of.get(name) not in (None, *self._parts) and not name.startswith(HEADS)

    def module(self, name: str) -> bool:
        """Whether the parameters of this module lie in an untrained part."""
        first = next((own for own, _ in self._model.get_submodule(name).named_parameters()), "")
        return self.parameter(f"{name}.{first}")

    def check_left(self, left: Sequence[str], found: Sequence[str], config: RunConfig) -> None:
        """Raise ConfigError if modules were found, but all of them are in untrained parts."""
        if left or not (idle := [name for name in found if self.module(name)]):
            return
        of_modules = ((path, part) for path, part in self._part_of.items() if path.startswith(tuple(idle)))
        where = ", ".join(dict.fromkeys(part for _, part in of_modules))
        raise ConfigError(
            f"--target-modules {' '.join(config.target_modules)}: all of these are in parts that are not trained,"
            f" {where}. Train those parts (--freeze, --train-parts), or name other modules: the trained parts are"
            f" {', '.join(self._parts)}."
        )


def _stacks_given(model: Any, config: RunConfig, idle: _Idle, every: Sequence[str]) -> list[str]:
    """--target-parameters, without those in untrained parts. `every`: the names of all parameters."""
    found = _named(model, config.target_parameters)
    trained = [name for name in found if not idle.parameter(name)]
    return config.target_parameters if trained == found else _short(trained, every)


def linear_layers(model: Any, parts: Sequence[str]) -> list[str] | str:
    """What `all-linear` means: the linear layers of these parts except heads, `OTHERS` and layers that PEFT refuses.
    Returns `all-linear` itself if the model has no other parts."""
    left = any(map(_is_other, model.modules())) or _refused(model)
    if set(anatomy(model).part_of.values()) <= set(parts) and not left:
        return ALL[0]
    return _all_linear(model, parts)


def _is_other(module: Any) -> bool:
    from torch import nn

    return isinstance(module, nn.Linear) and OTHERS.search(type(module).__name__) is not None


def _refused(model: Any) -> set[str]:
    """Last name components of layers on which PEFT takes no adapters: Mamba kernels read only the weights there."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    config, refused = LoraConfig(), set()
    for word in {name.rpartition(".")[2] for name, _ in model.named_modules()}:
        try:
            _check_lora_target_modules_mamba(config, model, word)
        except ValueError:
            refused.add(word)
    return refused


def _all_linear(model: Any, parts: Sequence[str]) -> list[str]:
    from torch import nn

    from shardproof.train.model.parts import heads_of

    part_of, refused = anatomy(model).part_of, _refused(model)
    heads = [module for module in heads_of(model) if module is not None]
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not _is_other(module)
        and name.rpartition(".")[2] not in refused
        and part_of.get(f"{name}.weight") in parts
        and not any(module is head for head in heads)
        and not f"{name}.".startswith(HEADS)
    ]


def _all_norms(model: Any, parts: Sequence[str]) -> list[str]:
    """The norms: modules with a weight and "norm" in the name of their class."""
    part_of, modules = anatomy(model).part_of, model.named_modules()
    norms = (name for name, module in modules if "norm" in type(module).__name__.lower())
    return [name for name in norms if part_of.get(f"{name}.weight") in parts]


def layers_of(places: Places, model: Any) -> list[str]:
    """The modules that get adapters."""
    from peft import LoraConfig

    if places.modules == ALL[0]:
        return _all_linear(model, [*anatomy(model).part_of.values()])
    return _reached(LoraConfig(target_modules=places.modules), model)


def _reached(config: Any, model: Any) -> list[str]:
    """The modules that a PEFT configuration selects."""
    from peft.tuners.tuners_utils import check_target_module_exists

    return [name for name, _ in model.named_modules() if name and check_target_module_exists(config, name)]


def _named(model: Any, names: Iterable[str]) -> list[str]:
    """The parameters whose names end in one of `names`."""
    ends = tuple(f".{end}" for end in names)
    return [name for name, _ in model.named_parameters() if f".{name}".endswith(ends)]


def _asks_for(name: str, given: str | Sequence[str]) -> bool:
    """Whether these names, or this regular expression, select this expert tensor; PEFT matches the ends of names."""
    inside = name.rpartition(".")[0]
    spelt = [name, inside, *(f"{inside}.{projection}" for projection in PROJECTIONS)]
    if isinstance(given, str):
        return any(re.fullmatch(given, one) for one in spelt)
    ends = tuple(f".{target}" for target in given)
    return any(f".{one}".endswith(ends) for one in spelt)


def _within(module: str, whole: Sequence[str]) -> bool:
    """Whether this module is, or is in, one of those trained in full, matching names as PEFT does."""
    above = itertools.accumulate(module.split("."), "{}.{}".format)
    return any(path.endswith(end) for path in above for end in whole)


def _short(names: Sequence[str], all_names: Sequence[str]) -> list[str]:
    """These names; those found in every layer are shortened to their part after the layer: `mlp.experts.down_proj`."""
    ends: dict[str, list[str]] = {_end(name): [] for name in names}
    wanted = set(names)
    for name in all_names:
        for end in ends:
            if f".{name}".endswith(f".{end}"):
                ends[end].append(name)
    shared = [end for end, having in ends.items() if wanted.issuperset(having)]
    return [*shared, *(name for name in names if _end(name) not in shared)]


def _end(name: str) -> str:
    return BEHIND_LAYERS.sub("", name)


def _check_bits(model: Any, lost: Sequence[str], config: RunConfig) -> None:
    """Raise ConfigError for a four-bit layer that PEFT can only target by its weight, whose packed shape differs."""
    from shardproof.integrations.four_bits import FourBitLinear

    part_of = anatomy(model).part_of
    packed = [
        name
        for name in lost
        if isinstance(model.get_submodule(name), FourBitLinear)
        or (config.quantize and part_of.get(f"{name}.weight") == "llm")
    ]
    if packed:
        names = dict.fromkeys(name.rpartition(".")[2] for name in packed)
        raise ConfigError(
            f"--target-modules {' '.join(config.target_modules)}: PEFT takes {', '.join(names)} of this model to be"
            f" its experts' projections, and cannot adapt {_end(packed[0])} in four bits. Name others, or leave"
            f" --quantize out."
        )


def _check_layers(model: Any, names: Sequence[str], config: RunConfig) -> None:
    """Raise ConfigError if one of these modules is not a layer that PEFT can adapt."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    layers = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention, Conv1D)
    asked = {name: model.get_submodule(name) for name in names}
    wrong = next((name for name, m in asked.items() if not isinstance(m, layers) or _is_other(m)), None)
    if wrong is None:
        return
    module = asked[wrong]
    within = dict.fromkeys(name.rpartition(".")[2] for name, m in module.named_modules() if isinstance(m, layers))
    inside = f" Name layers: those in it are {', '.join(within)}." if within else " Name linear layers."
    raise ConfigError(
        f"--target-modules {' '.join(config.target_modules)}: {wrong} is a {type(module).__name__}, and adapters go to"
        f" layers.{inside}{stacks_of(module, wrong)}"
    )


def check_wrapped(places: Places, config: RunConfig) -> None:
    """Raise ConfigError for options that PEFT does not support with adapters on tensors (added to the weights)."""
    wrong = [f"--lora-dropout {config.lora_dropout:g}"] if config.lora_dropout else []
    wrong += ["--dora"] if config.dora else []
    kind = config.init_lora_weights
    wrong += [f"--init-lora-weights {kind}"] if kind not in (None, "gaussian") else []
    if not (places.parameters and wrong):
        return
    shown = places.parameters[:3] + (["..."] if len(places.parameters) > 3 else [])
    others = ""
    if places.modules and not isinstance(places.modules, str):
        layers = dict.fromkeys(name.rpartition(".")[2] for name in places.modules)
        others = f", or name layers only: --target-modules {' '.join(layers)}"
    raise ConfigError(
        f"{' and '.join(wrong)}: PEFT cannot do this with adapters on tensors ({', '.join(shown)}), which are added to"
        f" their weights. Leave {('it', 'both', 'all')[len(wrong) - 1]} out{others}."
    )


def _check_parameters(model: Any, names: Sequence[str], modules: Sequence[str], whole: Sequence[str]) -> None:
    """Raise ConfigError for a name in --target-parameters that is not a matrix of the model, or a stack of matrices, or
    that is in a module that already gets adapters or is trained in full."""
    sizes = {name: parameter.ndim for name, parameter in model.named_parameters()}
    able = [name for name, dims in sizes.items() if dims in (2, 3)]
    for end in names:
        found = _named(model, [end])
        both = [name for name in found if name.rpartition(".")[0] in modules]
        if both:
            raise ConfigError(
                f"--target-parameters {end}: {both[0]} is in a module that has adapters. Leave {end} out."
            )
        within = next((name for name in found if _within(name.rpartition(".")[0], whole)), None)
        if within:
            raise ConfigError(
                f"--target-parameters {end}: {within} is in a module that is trained in full (--modules-to-save"
                f" {' '.join(whole)}). Leave one of them out."
            )
        if found and all(name in able for name in found):
            continue
        if found:
            raise ConfigError(
                f"--target-parameters {end}: {found[0]} has {sizes[found[0]]} dimension(s), and adapters need matrices."
            )
        raise ConfigError(
            f"--target-parameters {end}: the model has no parameter of that name."
            + did_you_mean(end, dict.fromkeys(map(_end, able)))
            + stacks_of(model)
        )


def stacks_of(model: Any, path: str = "") -> str:
    """A sentence that names the expert tensors of a model, or of its module at `path`; empty if there are none."""
    stacks = dict.fromkeys(_end(".".join(filter(None, (path, name)))) for name in _stacks(model))
    return f" Its experts are tensors: --target-parameters {' '.join(stacks)}." if stacks else ""


def _stacks(model: Any) -> list[str]:
    """The tensors that each hold one projection for all experts of a layer."""
    return [
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        if "expert" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    ]


def tell_of_left_out(model: Any, places: Places, parts: Sequence[str], whole: Sequence[str]) -> None:
    """Warn about expert tensors in these parts that get no adapters and are not trained in full: they are not linear
    layers, and PEFT handles them for some models only."""
    part_of, having = anatomy(model).part_of, set(_named(model, places.parameters))
    still = (name for name in _stacks(model) if name not in having and not _within(name.rpartition(".")[0], whole))
    left = dict.fromkeys(_end(name) for name in still if part_of[name] in parts)
    if left:
        log.warning(
            "The experts get no adapters: they are tensors, not linear layers. To adapt them too, add"
            " --target-parameters %s; to silence this warning, name layers in --target-modules.",
            " ".join(left),
        )


def sharing(modules: Iterable[tuple[str, Any]]) -> list[str]:
    """The names of two of these modules that share a weight, as in Zamba's blocks; empty if there are none."""
    having: dict[int, str] = {}
    for name, module in modules:
        weight = getattr(module, "weight", None)
        if weight is not None and (first := having.setdefault(id(weight), name)) != name:
            return [first, name]
    return []


def tell_of_shared(model: Any, places: Places) -> None:
    """Warn about adapters that cannot be merged: the layers that share a weight have different adapters."""
    head = model.get_output_embeddings()  # a merge unties it from the embedding
    reached = ((name, model.get_submodule(name)) for name in layers_of(places, model))
    if shared := sharing((name, module) for name, module in reached if module is not head):
        log.warning(
            "%s share one weight and get adapters of their own, which `export` cannot merge: `infer` and PEFT load them"
            " as they are. To merge the rest, leave such layers out of --target-modules.",
            " and ".join(shared),
        )
