"""A DeepSpeed JSON given to `--deepspeed`: read as by `shardproof.integrations.deepspeed`, translated to our options.

Settings that the commands lack are refused, since training without them would be a different run; settings that tune a
mechanism that this engine does not have are listed once. "auto" means the same as under transformers' Trainer: the
option's value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.errors import ConfigError
from shardproof.train.options.option import flag

if TYPE_CHECKING:
    from shardproof.integrations.deepspeed.sections import Named, Settings

Option = tuple[str, list[str]]

# Keys whose value is the value of one of our options.
PLAIN = {
    "gradient_clipping": "max_grad_norm",
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
# Keys that the reader knows but the commands do not use.
UNUSED = ("steps_per_print", "dataloader_drop_last")
ADAMW = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "adam_epsilon"}
ADAMW_UNUSED = ("fused", "foreach", "capturable", "differentiable")
# The commands use torch's loss scaler: the scale begins at 2 ** 16, halves at an overflow, doubles after 2,000 steps
# without one.
SCALE_UNUSED = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine_with_min_lr"}


def options_of(text: str) -> tuple[list[Option], list[str]]:
    """Our options for a file, or for JSON on the command line, and the keys that are not applied.

    Raises:
        ConfigError: there is no such file, or a setting in it is unknown, invalid or not available in the commands.
    """
    inline = text.lstrip().startswith("{")
    if not inline and not Path(text).expanduser().is_file():
        raise ConfigError(f"--deepspeed {text} is neither one of zero0 to zero3 nor an existing DeepSpeed file.")
    from shardproof.integrations.deepspeed import config

    try:
        settings, unused = config.read(json.loads(text) if inline else Path(text).expanduser())
    except json.JSONDecodeError as error:
        raise ConfigError(f"--deepspeed {text}: not JSON: {error.msg} at column {error.colno}.") from None
    unused += [key for key in UNUSED if key in settings.model_fields_set]
    try:
        return _once(list(_options(settings, unused))), unused
    except ConfigError as error:
        raise ConfigError(f"--deepspeed {text}: {error}") from None


def _options(settings: Settings, unused: list[str]) -> Iterator[Option]:
    zero = settings.zero_optimization
    if settings.torch_autocast.enabled:
        raise ConfigError('torch_autocast is not supported: write "bf16": {"enabled": true}.')
    yield "stage", [str(zero.stage)]
    if offload := zero.offload():
        yield "offload", [offload]
    if settings.bf16.enabled:
        yield "precision", ["bf16"]
    if settings.bf16.enabled and settings.communication_data_type == "bf16":
        yield "reduce_dtype", ["bf16"]
    elif settings.communication_data_type not in (None, "none", "fp32"):
        unused.append("communication_data_type")
    if settings.fp16.enabled:
        if settings.fp16.loss_scale:
            raise ConfigError(
                "fp16.loss_scale: the commands support dynamic scaling only. Remove the key, or set it to 0."
            )
        unused += [f"fp16.{key}" for key in SCALE_UNUSED if key in settings.fp16.model_fields_set]
        yield "precision", ["fp16"]
    for key, option in PLAIN.items():
        if key in settings.model_fields_set:
            yield option, [f"{getattr(settings, key):g}"]
    if settings.optimizer is not None:
        yield from _optimizer(settings.optimizer, unused)
    if settings.scheduler is not None:
        yield from _scheduler(settings.scheduler)


def _optimizer(section: Named, unused: list[str]) -> Iterator[Option]:
    import torch

    from shardproof.integrations.deepspeed import optimizers

    kind, settings = optimizers.arguments(section)
    if kind is not torch.optim.AdamW:
        raise ConfigError(
            f"optimizer.type {section.type} is not AdamW, the commands' default. Remove the section; for your own "
            "optimizer use --external-plugins and --optimizer."
        )
    for name, value in settings.items():
        if section.params.get(name, "auto") == "auto":
            continue
        if name in ADAMW:
            yield ADAMW[name], [str(value)]
        elif name == "betas":
            yield "adam_beta1", [str(value[0])]
            yield "adam_beta2", [str(value[1])]
        elif name in ADAMW_UNUSED:
            unused.append(f"optimizer.params.{name}")
        elif value:
            raise ConfigError(f"optimizer.params.{name} is not an option of the commands: remove it.")


def _scheduler(section: Named) -> Iterator[Option]:
    from shardproof.integrations.deepspeed import schedules

    kind = schedules.OF_DEEPSPEED.get(section.type)
    if kind is None or section.type not in SCHEDULES:
        raise ConfigError(
            f"scheduler.type {section.type} has no equivalent in the commands ({', '.join(SCHEDULES)} have one). "
            "Remove the section and give --lr-scheduler."
        )
    settings = {key: value for key, value in section.params.items() if value != "auto"}
    schedules.check_arguments(kind, settings, "scheduler", needed=False)
    if settings.get("warmup_type", "log") != "linear":
        raise ConfigError(
            "scheduler.params.warmup_type is 'log' (DeepSpeed's default), which the commands do not have: write "
            '"warmup_type": "linear", or remove the section and give --lr-scheduler.'
        )
    for name in ("warmup_min_lr", "warmup_min_ratio"):
        if settings.get(name, 0):
            raise ConfigError(f"scheduler.params.{name} {settings[name]}: the commands warm up from 0.")
    if "total_num_steps" in settings:
        raise ConfigError('scheduler.params.total_num_steps: schedules end with the run here. Write "auto".')
    yield "lr_scheduler", [SCHEDULES[section.type]]
    if "warmup_max_lr" in settings:
        yield "learning_rate", [str(settings["warmup_max_lr"])]
    if section.params.get("warmup_num_steps") != "auto":
        yield "warmup_steps", [str(settings.get("warmup_num_steps", 1000))]  # DeepSpeed's default
    if section.type == "WarmupCosineLR":
        yield "lr_scheduler_kwargs", [f"min_lr_rate={settings.get('cos_min_ratio', 0.0001)}"]  # also DeepSpeed's


def _once(found: list[Option]) -> list[Option]:
    """Each option once; two sections may give the same one."""
    values: dict[str, list[str]] = {}
    for option, value in found:
        if not same(values.setdefault(option, value), value):
            raise ConfigError(f"it gives two values for {flag(option)}: {values[option][0]}, {value[0]}.")
    return list(values.items())


def same(a: Any, b: Any) -> bool:
    """Whether two lists of texts stand for the same values: 1e-3 equals 0.001."""

    def plain(text: str) -> Any:
        try:
            return float(text)
        except ValueError:
            return text.lower()

    return [plain(text) for text in a] == [plain(text) for text in b]
