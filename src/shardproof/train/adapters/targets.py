"""Where adapters go: the linear layers and the tensors of experts that --target-modules and --target-parameters mean.

transformers 5 keeps the experts of a mixture in one tensor a layer, and PEFT reads the names of their projections as
those tensors: `gate_proj` becomes `experts.gate_up_proj`. It does so with every layer of such a name, so that shared
experts and dense layers get no adapters, those of other parts give theirs to the experts, and a regular expression
loses the layers that it tells apart. So PEFT is asked what it would do, and gets each place by a name that it leaves
as it is: a layer that it would not find, as the weight that it has.
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
# Experts' projections as the files of models call them, one by one.
PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
# Layers of transformers that are linear and give or take something else: scores and choices, or a part for each matrix.
OTHERS = re.compile(r"(Router|GroupedLinear)$")
BEHIND_LAYERS = re.compile(r".*\.\d+\.(?=[^\d])")


@dataclass(frozen=True)
class Places:
    """Where adapters go, in the words of PEFT's `LoraConfig`.

    Attributes:
        modules: `target_modules`, names of modules or a regular expression.
        parameters: `target_parameters`, names of matrices, and of experts' stacks of them.
        ranks, alphas: `rank_pattern` and `alpha_pattern`: a tensor of two projections has adapters of twice the rank.
        read: the names among --target-modules that PEFT reads as experts.
    """

    modules: str | list[str]
    parameters: list[str]
    ranks: dict[str, int] = field(default_factory=dict)
    alphas: dict[str, float] = field(default_factory=dict)
    read: frozenset[str] = frozenset()


def places_of(model: Any, config: RunConfig, parts: Sequence[str]) -> Places:
    """Where new adapters of these options go in this model.

    Args:
        parts: those that are trained: towers and talkers have layers of the same names as the language model.

    Raises:
        ConfigError: one of two projections that are one tensor is named without the other, a parameter that the model
            does not have, a module that is no layer, or what is in other parts alone.
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
    if config.tuner != LORA:  # others go on modules alone, and are told each by its name
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
    """What is in parts of a model that are not trained."""

    def __init__(self, model: Any, parts: Sequence[str]) -> None:
        self._model, self._parts, self._part_of = model, parts, anatomy(model).part_of

    def parameter(self, name: str) -> bool:
        """Whether this parameter is; a tied one has the name of the first. A head for scores is trained with any."""
        return self._part_of.get(name) not in (None, *self._parts) and not name.startswith(HEADS)

    def module(self, name: str) -> bool:
        """Whether the parameters of this module are."""
        first = next((own for own, _ in self._model.get_submodule(name).named_parameters()), "")
        return self.parameter(f"{name}.{first}")

    def check_left(self, left: Sequence[str], found: Sequence[str], config: RunConfig) -> None:
        """Raise ConfigError where modules were found by their names, and none is left as all are in such parts."""
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
    """--target-parameters, without those of parts that are not trained. `every`: the names of all parameters."""
    found = _named(model, config.target_parameters)
    trained = [name for name in found if not idle.parameter(name)]
    return config.target_parameters if trained == found else _short(trained, every)


def linear_layers(model: Any, parts: Sequence[str]) -> list[str] | str:
    """The linear layers of these parts but for heads, `OTHERS` and what PEFT refuses, which is what `all-linear` means;
    the same words where the model has no other parts."""
    left = any(map(_is_other, model.modules())) or _refused(model)
    if set(anatomy(model).part_of.values()) <= set(parts) and not left:
        return ALL[0]
    return _all_linear(model, parts)


def _is_other(module: Any) -> bool:
    from torch import nn

    return isinstance(module, nn.Linear) and OTHERS.search(type(module).__name__) is not None


def _refused(model: Any) -> set[str]:
    """Where PEFT takes no adapters, by the last word: kernels of Mamba read only the weights there."""
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
    """The modules with a weight of their own that are called after what they do."""
    part_of, modules = anatomy(model).part_of, model.named_modules()
    norms = (name for name, module in modules if "norm" in type(module).__name__.lower())
    return [name for name in norms if part_of.get(f"{name}.weight") in parts]


def layers_of(places: Places, model: Any) -> list[str]:
    """The modules that get adapters there."""
    from peft import LoraConfig

    if places.modules == ALL[0]:
        return _all_linear(model, [*anatomy(model).part_of.values()])
    return _reached(LoraConfig(target_modules=places.modules), model)


def _reached(config: Any, model: Any) -> list[str]:
    """The modules that PEFT's configuration names."""
    from peft.tuners.tuners_utils import check_target_module_exists

    return [name for name, _ in model.named_modules() if name and check_target_module_exists(config, name)]


def _named(model: Any, names: Iterable[str]) -> list[str]:
    """The parameters whose names end so."""
    ends = tuple(f".{end}" for end in names)
    return [name for name, _ in model.named_parameters() if f".{name}".endswith(ends)]


def _asks_for(name: str, given: str | Sequence[str]) -> bool:
    """Whether these names, or this expression, ask for this tensor of experts, where PEFT goes by the ends of names."""
    inside = name.rpartition(".")[0]
    spelt = [name, inside, *(f"{inside}.{projection}" for projection in PROJECTIONS)]
    if isinstance(given, str):
        return any(re.fullmatch(given, one) for one in spelt)
    ends = tuple(f".{target}" for target in given)
    return any(f".{one}".endswith(ends) for one in spelt)


def _within(module: str, whole: Sequence[str]) -> bool:
    """Whether this is, or is in, one of the modules that are trained whole, by their names as PEFT looks for them."""
    above = itertools.accumulate(module.split("."), "{}.{}".format)
    return any(path.endswith(end) for path in above for end in whole)


def _short(names: Sequence[str], all_names: Sequence[str]) -> list[str]:
    """These names, those that every layer has without what stands before: `mlp.experts.down_proj`."""
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
    """Raise ConfigError for a layer in four bits that PEFT finds as a weight only: it has none in its own shape."""
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
            f"--target-modules {' '.join(config.target_modules)}: PEFT takes {', '.join(names)} of this model for its"
            f" experts', and cannot adapt {_end(packed[0])} in four bits. Name others, or leave --quantize out."
        )


def _check_layers(model: Any, names: Sequence[str], config: RunConfig) -> None:
    """Raise ConfigError for one of these modules that is none of the layers that PEFT adapts."""
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
    """Raise ConfigError for what PEFT does not do with adapters of tensors, which are added to them."""
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
    """Raise ConfigError for a name of --target-parameters that is no matrix of the model's, or stack of them, or is in
    one of the modules that get adapters anyway, or are trained whole."""
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
    """A sentence that names the tensors of experts of a model, or of the module of it that has this path, or
    nothing."""
    stacks = dict.fromkeys(_end(".".join(filter(None, (path, name)))) for name in _stacks(model))
    return f" Its experts are tensors: --target-parameters {' '.join(stacks)}." if stacks else ""


def _stacks(model: Any) -> list[str]:
    """The tensors of which each holds a projection of all experts of a layer."""
    return [
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        if "expert" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    ]


def tell_of_left_out(model: Any, places: Places, parts: Sequence[str], whole: Sequence[str]) -> None:
    """Warn of tensors of experts in these parts that get no adapters and are not trained whole: they are no linear
    layers, and PEFT makes an exception of some models only."""
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
    """Two of these modules, by name, whose weight is one, as those of Zamba's blocks; nothing where there are none."""
    having: dict[int, str] = {}
    for name, module in modules:
        weight = getattr(module, "weight", None)
        if weight is not None and (first := having.setdefault(id(weight), name)) != name:
            return [first, name]
    return []


def tell_of_shared(model: Any, places: Places) -> None:
    """Warn of adapters that no merge takes into their weight: each of its places has others."""
    head = model.get_output_embeddings()  # which parts from the embedding when it is merged
    reached = ((name, model.get_submodule(name)) for name in layers_of(places, model))
    if shared := sharing((name, module) for name, module in reached if module is not head):
        log.warning(
            "%s share one weight and get adapters of their own, which `export` cannot merge: `infer` and PEFT load them"
            " as they are. To merge the rest, leave such layers out of --target-modules.",
            " and ".join(shared),
        )
