"""Options for individual models besides the one that is trained."""

from __future__ import annotations

from collections.abc import Mapping

from shardproof.errors import ConfigError
from shardproof.train.checks.contradictions import check_offload
from shardproof.train.options.option import flag
from shardproof.train.options.rlhf_config import RlhfConfig


def check_others(config: RlhfConfig, known: Mapping[str, tuple[str, ...]]) -> None:
    """Raise ConfigError for a stage, precision or offloading of a model that is not used. `known`: the models of each
    algorithm."""
    kind = config.rlhf_type
    for option in ("model_stages", "model_precisions", "model_offloads"):
        for name, value in getattr(config, option).items():
            if name not in known.get(kind, ()):
                there = f"has {', '.join(known[kind])}" if kind in known else "has no other model"
                raise ConfigError(f"{flag(option)} {name}={value}: --rlhf-type {kind} {there}.")
            if name == "ref_model" and config.tuner != "full":
                raise ConfigError(
                    f"{flag(option)} ref_model={value}: with --tuner {config.tuner} the reference is the model without"
                    " adapters."
                )
            if name in ("reward_model", "teacher_model") and not getattr(config, name):
                raise ConfigError(f"{flag(option)} {name}={value} needs {flag(name)}.")
    for name, place in config.model_offloads.items():
        said = f"--model-offloads {name}="
        if place != "none":
            check_offload(place, said)
        if place == "optimizer" and name != "value_model":
            raise ConfigError(f"{said}optimizer: it is not trained and has no optimizer. Use all or nvme:FOLDER.")
    if config.model_precisions.get("value_model") == "fp16" and config.precision != "fp16":
        raise ConfigError("--model-precisions value_model=fp16 needs a scaled loss: add --precision fp16.")
