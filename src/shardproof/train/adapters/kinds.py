"""PEFT configurations for adapters other than LoRA, built from --tuner-arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from shardproof.errors import ConfigError, did_you_mean
from shardproof.train.model.loading import first_line
from shardproof.train.options.config import RunConfig
from shardproof.train.options.option import flag
from shardproof.train.options.tuners import ADALORA, KINDS

REFUSED_BY_PEFT = (
    *(ValueError, TypeError, NotImplementedError, AttributeError, RuntimeError, ImportError),
    *(ArithmeticError, AssertionError, LookupError),
)

# Fields of every PEFT configuration that have an option of their own here, or that the run sets itself ("").
OURS = {
    **{name: name for name in ("target_modules", "modules_to_save", "target_parameters")},
    **dict.fromkeys(("task_type", "inference_mode", "base_model_name_or_path", "total_step"), ""),
    **dict.fromkeys(("peft_type", "peft_version", "auto_mapping", "revision"), ""),
}
# Fields that PEFT's AdaLoRA inherits from LoRA but ignores or does not support.
IDLE = {
    ADALORA: (
        *("r", "use_dora", "velora_config", "use_qalora", "qalora_group_size", "lora_bias", "rank_pattern"),
        *("alpha_pattern", "megatron_config", "megatron_core", "trainable_token_indices", "loftq_config"),
        *("eva_config", "corda_config", "lora_ga_config", "alora_invocation_tokens", "monteclora_config"),
        *("layer_replication", "runtime_config", "use_bdlora", "arrow_config", "kasa_config", "ensure_weight_tying"),
    )
}
# Fields that PEFT requires, and that the run sets itself or leaves empty.
BESIDE_DEFAULTS: dict[str, dict[str, Any]] = {
    ADALORA: {"total_step": 2**31},  # until the run begins
    "ia3": {"feedforward_modules": []},
}


def check_arguments(config: RunConfig) -> None:
    """Raise ConfigError for --tuner-arguments that --tuner does not take. Those of --adapters were written by PEFT."""
    if config.tuner in KINDS and not config.adapters:
        arguments_of(config.tuner, config.tuner_arguments)


def check_steps(config: RunConfig, steps: int) -> None:
    """Raise ConfigError if a run has too few steps for AdaLoRA to reallocate its ranks."""
    if config.tuner != ADALORA or config.adapters:  # --adapters already have their ranks
        return
    given = takes(ADALORA) | arguments_of(ADALORA, config.tuner_arguments)
    first, last = given["tinit"], steps - given["tfinal"]
    if first >= last or last < 2:
        raise ConfigError(
            f"--tuner adalora reallocates ranks after step {first} (tinit) until step {last} (tfinal before the last):"
            f" {steps} step(s) leave none for that. Give smaller values (--tuner-arguments tinit=N tfinal=N), or take"
            " more steps."
        )
    if given["init_r"] <= given["target_r"]:
        raise ConfigError(
            "--tuner adalora starts with more ranks than it keeps: --tuner-arguments init_r must be above target_r."
        )


def config_class(tuner: str) -> type[Any]:
    """PEFT's configuration of this kind of adapter."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    found: type[Any] = PEFT_TYPE_TO_CONFIG_MAPPING[tuner.upper()]
    return found


def takes(tuner: str) -> dict[str, Any]:
    """The --tuner-arguments that a tuner takes: default values by name."""
    idle = (*OURS, *IDLE.get(tuner, ()))
    fields = (field for field in dataclasses.fields(config_class(tuner)) if field.name not in idle)
    return {f.name: f.default if f.default is not dataclasses.MISSING else {} for f in fields}


def arguments_of(tuner: str, given: Mapping[str, str]) -> dict[str, Any]:
    """--tuner-arguments with the types that PEFT's configuration gives them.

    Raises:
        ConfigError: there is no such argument, or its value is of another kind.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    known, kind = takes(tuner), config_class(tuner)
    types = typing.get_type_hints(kind)
    found = {}
    for name, text in given.items():
        said = f"--tuner-arguments {name}={text}"
        if name not in known:
            option = f" It has its own option: {flag(OURS[name])}." if OURS.get(name) else ""
            hint = option or did_you_mean(name, known)
            there = ", ".join(f"{one} ({default})" for one, default in known.items())
            raise ConfigError(f"{said}: --tuner {tuner} has no such argument.{hint}\nIt takes {there}.")
        adapter = TypeAdapter(types[name], config=ConfigDict(arbitrary_types_allowed=True))
        for value in _readings(text):
            try:
                found[name] = adapter.validate_python(value)
                break
            except ValidationError:
                continue
        else:
            raise ConfigError(f"{said}: PEFT expects {_told(types[name])} there, such as {known[name]}.")
    return found


def of_kind(config: RunConfig, task: str | None, modules: str | list[str]) -> Any:
    """The PEFT configuration of --tuner on these modules.

    Raises:
        ConfigError: PEFT does not take these arguments, or not together.
    """
    kind = config_class(config.tuner)
    how = BESIDE_DEFAULTS.get(config.tuner, {}) | arguments_of(config.tuner, config.tuner_arguments)
    how |= {"target_modules": modules, "modules_to_save": config.modules_to_save or None}
    inner = how.get("feedforward_modules")  # of IA3: PEFT needs these names spelt like the targets
    if isinstance(inner, list):
        how["feedforward_modules"] = [
            m for m in modules if f".{m}".endswith(tuple(f".{name}" for name in inner))
        ] or inner
    try:
        return kind(task_type=task, **how)
    except REFUSED_BY_PEFT as error:
        raise ConfigError(refused_by_peft(config, error)) from error


def refused_by_peft(config: RunConfig, error: Exception) -> str:
    """The message for an error from PEFT, whose own text may say very little."""
    given = [f"{name}={value}" for name, value in config.tuner_arguments.items()]
    said = " ".join([f"--tuner {config.tuner}", *(["--tuner-arguments", *given] if given else [])])
    return f"{said}: PEFT refuses it: {first_line(error)}"


def _readings(text: str) -> Iterator[Any]:
    """The values that a text may stand for, to be tried against the expected type."""
    if text.lower() == "none":
        yield None
    with contextlib.suppress(ValueError):
        yield json.loads(text)
    if "," in text:
        yield [part.strip() for part in text.split(",")]
    if re.fullmatch(r"[\w.]+", text):  # a name: PEFT would take a lone string for a regular expression over full names
        yield [text]
    yield text


def _told(kind: Any) -> str:
    """A type as Python writes it."""
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
