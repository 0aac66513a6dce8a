"""Options for adapters, and which of them apply to the kind that --tuner names."""

from __future__ import annotations

from shardproof.errors import ConfigError
from shardproof.train.options.config import RunConfig
from shardproof.train.options.option import first_given
from shardproof.train.options.tuners import FULL, KINDS, LORA

ONLY_LORA = (
    *("lora_rank", "lora_alpha", "lora_dropout", "lorap_lr_ratio", "rslora", "dora"),
    *("target_parameters", "init_lora_weights"),
)
OF_ADAPTERS = (*ONLY_LORA, "target_modules", "modules_to_save", "quantize", "adapters", "tuner_arguments")
NAMED = "freeze_parameters", "trainable_parameters", "lisa_activated_layers", "new_blocks"


def check_tuner(config: RunConfig) -> None:
    """Raise ConfigError for options that do not apply to the --tuner of the run."""
    if config.tuner == FULL and (given := first_given(config, OF_ADAPTERS)):
        raise ConfigError(f"{given} applies to adapters, and --tuner full trains every weight: add --tuner lora.")
    if config.tuner != FULL and (given := first_given(config, [n for n in NAMED if hasattr(config, n)])):
        raise ConfigError(f"{given} needs --tuner full: with adapters, --target-modules says what is trained.")
    if not config.lisa_activated_layers and (given := first_given(config, ["lisa_step_interval"])):
        raise ConfigError(f"{given} needs --lisa-activated-layers: add it.")
    if config.tuner == LORA and config.tuner_arguments:
        raise ConfigError(
            "--tuner-arguments does not apply to --tuner lora, which has its own options (--lora-rank ...)."
        )
    if config.tuner in KINDS and (given := first_given(config, ONLY_LORA)):
        raise ConfigError(f"{given} needs --tuner lora. --tuner {config.tuner} takes --tuner-arguments NAME=X.")
    if config.tuner in KINDS and not KINDS[config.tuner].half and config.precision != "fp32":
        raise ConfigError(f"--tuner {config.tuner}: PEFT computes it only in fp32. Add --precision fp32.")
    if config.tuner in KINDS and config.quantize and not KINDS[config.tuner].four_bits:
        able = ", ".join([LORA, *(name for name, kind in KINDS.items() if kind.four_bits)])
        raise ConfigError(
            f"--quantize and --tuner {config.tuner}: it computes with the weights themselves, which are packed. Use"
            f" another one ({able}), or leave --quantize out."
        )
