"""PEFT adapters: which modules get them, and what else is trained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

from shardproof.errors import ConfigError, did_you_mean
from shardproof.models.families.anatomy import anatomy
from shardproof.models.families.family import CAUSAL
from shardproof.plugins import load
from shardproof.train.adapters.beginning import check_layers_begin, in_words_of_peft
from shardproof.train.adapters.begun import with_trained_adapters
from shardproof.train.adapters.kinds import REFUSED_BY_PEFT, check_arguments, of_kind, refused_by_peft
from shardproof.train.adapters.targets import ALL, check_wrapped, places_of, stacks_of, tell_of_left_out, tell_of_shared
from shardproof.train.model.balance import check_balance
from shardproof.train.model.lacking import without_lacking
from shardproof.train.model.loading import first_line, load_model, registered_model
from shardproof.train.model.made_anew import check_kept
from shardproof.train.options.config import RunConfig
from shardproof.train.options.patterns import check_pattern, whole_names
from shardproof.train.options.rlhf_config import REFERRED
from shardproof.train.options.tuners import FULL, LORA, reads_weights

Config = TypeVar("Config", bound=RunConfig)


def with_adapters(model: Any, config: RunConfig, task: str = "CAUSAL_LM") -> Any:
    """The model with untrained parts frozen and, if --tuner asks for them, with PEFT adapters, identical on every rank:
    new ones, or those of --adapters.

    Raises:
        ConfigError: no module matches a target, or the model has no part with a given name.
    """
    from shardproof.train.model.parts import choose_parts

    chosen = choose_parts(model, config)
    if config.gradient_checkpointing and (config.tuner != FULL or getattr(config, "new_blocks", 0)):
        model.enable_input_require_grads()
    if config.tuner == FULL:
        return model
    if config.adapters:
        return with_trained_adapters(model, config, task, chosen)
    return _adapted(model, new_adapters(config, task, model, chosen), config)


def _adapted(model: Any, how: Any, config: RunConfig) -> Any:
    """The PEFT model for this adapter configuration."""
    from peft import get_peft_model

    is_lora = config.tuner == LORA
    refused: tuple[type[Exception], ...] = (ValueError,) if is_lora else REFUSED_BY_PEFT
    try:
        return get_peft_model(model, how)
    except refused as error:
        told = f"--target-modules {' '.join(config.target_modules)}: {first_line(error)}"
        raise ConfigError(told if is_lora else refused_by_peft(config, error)) from error


def check_named_parts(source: str, config: Config, kind: str = CAUSAL) -> Config:
    """The options, without the parts that ms-swift options name but the model lacks.

    Checked on the model without its weights, before anything slow; a plugin's model is checked when it is loaded.

    Raises:
        ConfigError: a named part or target does not exist in the model, or the model does not support an option.
    """
    from shardproof.train.model.parts import choose_parts, head_for_words, whole_parts

    new = config.tuner != FULL and not config.adapters  # PEFT checks the targets of existing adapters when it adds them
    targets = config.target_modules if new and config.target_modules != ALL else []
    parts = config.freeze or config.train_parts or config.part_learning_rates
    parts = parts or config.freeze_parameters or config.trainable_parameters
    check_arguments(config)
    balance = getattr(config, "router_aux_loss_coef", 0)
    may_refuse = config.attn or config.lisa_activated_layers or getattr(config, "new_blocks", 0)
    may_refuse = may_refuse or (getattr(config, "packing", False) and config.compile)
    if not (new or parts or balance or may_refuse or config.padding_free):
        return config
    if registered_model(source, load(config.external_plugins), config.model_type) is not None:
        return config
    model = load_model(source, config, kind, to_shard=True)
    config = without_lacking(config, anatomy(model).parts)
    if balance:
        check_balance(model)
    config = whole_parts(model, config) if new else config
    whole = config.modules_to_save if new else []
    named = {"--target-modules": targets, "--modules-to-save": whole}
    chosen = choose_parts(model, config)
    if config.lisa_activated_layers:
        from shardproof.train.optim.in_turn import check_layers

        check_layers(model, config.lisa_activated_layers)
    places = places_of(model, config, chosen) if new else None
    if places is not None:
        if kind == CAUSAL:  # a classifier saves what it newly initialises
            check_kept(model, config.modules_to_save)
        check_wrapped(places, config)
        check_layers_begin(model, places, config)
        tell_of_shared(model, places)
        if config.target_modules == ALL:
            tell_of_left_out(model, places, chosen, whole)
    idle = None if kind == CAUSAL else head_for_words(model)  # the language-model head is not used
    there = {name: module for name, module in model.named_modules() if name and module is not idle}
    modules = dict.fromkeys(name.rpartition(".")[2] for name in there)
    if pattern := whole_names(targets):
        _check_pattern(pattern, [*there, *(places.parameters if places is not None else ())])
        named["--target-modules"] = []
    elif places is not None:
        named["--target-modules"] = [target for target in targets if target not in places.read]
    for option, target in ((option, target) for option, targets in named.items() for target in targets):
        if not any(f".{name}".endswith(f".{target}") for name in there):
            hint = did_you_mean(target, modules)
            linear = dict.fromkeys(n.rpartition(".")[2] for n, m in there.items() if hasattr(m, "in_features"))
            every = "; 'all-linear' is all but the head" if option == "--target-modules" else ""
            if [target] == ALL and every:
                hint = " 'all-linear' stands alone: beside other names, write out those that it means."
            raise ConfigError(
                f"{option} {target}: the model has no module of that name.{hint}\n"
                f"Its linear layers are {', '.join(linear)}{every}.{stacks_of(model) if new else ''}"
            )
    if getattr(config, "rlhf_type", None) in REFERRED:
        _check_head(model, targets, config.target_parameters)
    if places is not None and config.tuner != LORA and not reads_weights(config.tuner):
        _adapted(model, of_kind(config, None, places.modules), config)  # finds sizes that do not fit its layers
    return config


def _check_head(model: Any, targets: Sequence[str], parameters: Sequence[str]) -> None:
    """Raise ConfigError for adapters on the head, if a TRL trainer multiplies by the head's weight itself: they would
    not be trained."""
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), "")
    pattern = whole_names(targets)
    named = re.fullmatch(pattern, name) if pattern else any(f".{name}".endswith(f".{target}") for target in targets)
    weight = any(f".{name}.weight".endswith(f".{target}") for target in parameters)
    if name and (named or weight):
        given = f"--target-modules {' '.join(targets)}" if named else f"--target-parameters {' '.join(parameters)}"
        raise ConfigError(
            f"{given}: TRL uses the weight of the head, {name}, without its adapters, so they would not be trained."
            f" Leave it out, or train the full head: --modules-to-save"
            f" {name.rpartition('.')[2]}."
        )


def _check_pattern(pattern: str, names: Sequence[str]) -> None:
    check_pattern("--target-modules", pattern)
    if not any(re.fullmatch(pattern, name) for name in names):
        raise ConfigError(
            f"--target-modules {pattern}: no module has that full name. Names are like {names[len(names) // 2]}."
        )


def new_adapters(config: RunConfig, task: str, model: Any, parts: Sequence[str]) -> Any:
    """The PEFT configuration for our options. In a model with several parts, "all linear layers" means those of
    `parts`.

    Raises:
        ConfigError: the model has no such modules, or --tuner takes no such arguments.
    """
    from peft import LoraConfig

    from shardproof.train.model.parts import whole_parts

    config = whole_parts(model, config)
    check_kept(model, config.modules_to_save)
    places = places_of(model, config, parts)
    check_wrapped(places, config)
    check_layers_begin(model, places, config)
    writes = task != "CAUSAL_LM" or hasattr(model, "prepare_inputs_for_generation")
    task_type = task if writes else None  # PEFT's class for that task needs methods that custom model code may lack
    if config.tuner != LORA:
        return of_kind(config, task_type, places.modules)
    return LoraConfig(
        task_type=task_type,
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        use_rslora=config.rslora,
        use_dora=config.dora,
        init_lora_weights=in_words_of_peft(config),
        target_modules=places.modules,
        target_parameters=places.parameters or None,
        rank_pattern=places.ranks,
        alpha_pattern=places.alphas,
        modules_to_save=config.modules_to_save or None,
        ensure_weight_tying=_are_tied(model, config.modules_to_save),
    )


def _are_tied(model: Any, names: Sequence[str]) -> bool:
    """Whether one of these modules is an embedding tied to the head."""
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return False
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    paths = [f".{name}" for name, module in model.named_modules() if any(module is end for end in ends)]
    return any(path.endswith(f".{name}") for path in paths for name in names)
