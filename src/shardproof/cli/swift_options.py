"""Options of ms-swift 4, under the names that they have here.

An option that both have under one name is not listed. What Swift calls differently, writes differently or does by
default stands here, so that its commands run as they are, or are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from shardproof.errors import ConfigError

Ours = list[tuple[str, list[str]]]  # our option and its values

RENAMED = {
    "tuner_type": "tuner",
    "train_type": "tuner",
    "sft_type": "tuner",
    "model_id_or_path": "model",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "per_device_batch_size",
    "batch_size": "per_device_batch_size",
    "lr_scheduler_type": "lr_scheduler",
    "split_dataset_ratio": "val_split",
    "resume_from_checkpoint": "resume",
    "attn_impl": "attn",
    "truncation_strategy": "truncation",
    "loss_scale": "loss",
    "loss_type": "loss",
    "metric": "metrics",
    "eval_metric": "metrics",
    "torch_dtype": "precision",
    "strict": "bad_rows",
    "overlong_filter": "mask_truncated_completions",
    "num_ppo_epochs": "num_iterations",
    "kl_coef": "beta",
    "cliprange": "epsilon",
    "lam": "gae_lambda",
    "vf_coef": "value_weight",
    "cliprange_value": "value_clip",
}

# Of our option, what Swift's values are called.
VALUES = {
    "precision": {"bfloat16": "bf16", "float32": "fp32"},
    "truncation": {"delete": "drop"},
    "loss": {"default": "answer"},
    "bad_rows": {"true": "stop", "false": "skip"},
    "attn": {"flash_attn": "flash_attention_2"},
}

# Options that are variables there.
VARIABLES = {
    "NPROC_PER_NODE": "nproc",
    "MAX_PIXELS": "max_pixels",
    "FPS_MAX_FRAMES": "max_frames",
    "ENABLE_AUDIO_OUTPUT": "enable_audio_output",
}

# What decides nothing here: the work is done anyway, or in another way.
WITHOUT_EFFECT = {
    "tuner_backend": "adapters are PEFT's",
    "template_backend": "templates are the tokenizer's",
    "use_hf": "folders are local, or of the Hugging Face hub",
    "check_model": "files are read where they lie",
    "add_version": "a new folder is made unless --output-dir is given",
    "dataset_num_proc": "reading and encoding take seconds",
    "load_from_cache_file": "reading and encoding take seconds",
    "lazy_tokenize": "reading and encoding take seconds",
    "dataset_shuffle": "rows are shuffled in each epoch",
    "train_dataloader_shuffle": "rows are shuffled in each epoch",
    "dataloader_num_workers": "rows are encoded before",
    "dataloader_pin_memory": "rows are encoded before",
    "dataloader_persistent_workers": "rows are encoded before",
    "dataloader_prefetch_factor": "rows are encoded before",
    "remove_unused_columns": "what is not asked for is not used",
    "logging_first_step": "the first step is always logged",
    "average_tokens_across_devices": "every token of a step weighs the same on all processes, always",
    "ddp_find_unused_parameters": "parameters may be unused, always",
    "ddp_broadcast_buffers": "ranks start equal, always",
    "ddp_timeout": "ranks that wait for each other for good are found within seconds",
    "ddp_backend": "chosen by the device",
    "ds3_gather_for_generation": "generation keeps parameters gathered where they fit",
    "safe_serialization": "weights are safetensors, always",
    "create_checkpoint_symlink": "--resume auto finds the newest checkpoint",
    "ignore_args_error": "options are checked first",
    "model_type": "the model's own config says it",
    "template": "the tokenizer's own template is used; --chat-template gives another",
}

# What Swift's users ask for and has no equivalent here, by the option's value that asks for nothing.
MISSING = {
    **dict.fromkeys(
        (
            *("packing", "padding_free", "streaming", "use_liger_kernel", "use_dora", "use_rslora", "use_galore"),
            *("predict_with_generate", "push_to_hub", "use_ray", "use_vllm", "use_flash_ckpt", "save_only_model"),
            *("enable_dft_loss", "enable_channel_loss", "eval_use_evalscope", "resume_only_model", "group_by_length"),
            *("dynamic_sample", "offload_teacher_model", "sync_ref_model"),
        ),
        ("false",),
    ),
    **dict.fromkeys(("sequence_parallel_size", "deepspeed_autotp_size"), ("1",)),
    **dict.fromkeys(("neftune_noise_alpha", "lisa_activated_layers", "freeze_parameters_ratio"), ("0", "0.0")),
    **dict.fromkeys(
        (
            *("quant_method", "quant_bits", "freeze_parameters", "freeze_parameters_regex", "trainable_parameters"),
            *("trainable_parameters_regex", "target_regex", "target_parameters", "modules_to_save", "init_weights"),
            *("fsdp", "zero_hpz_partition_size", "rope_scaling", "max_model_len", "device_map", "max_memory"),
            *("lorap_lr_ratio", "model_author", "model_name", "custom_dataset_info"),
            *("interleave_prob", "cached_dataset", "new_special_tokens", "task_type", "num_labels", "model_revision"),
            *(
                "optim",
                "optim_args",
                "adam_beta1",
                "adam_beta2",
                "adam_epsilon",
                "lr_scheduler_kwargs",
                "save_strategy",
            ),
            *("eval_strategy", "adapters", "metric_for_best_model", "model_kwargs"),
            *("agent_template", "hub_token", "hub_model_id"),
            *("per_device_eval_batch_size", "data_seed", "max_epochs", "multi_turn_scheduler", "vllm_mode"),
            *("ref_adapters", "reward_adapters", "teacher_deepspeed", "reward_model_plugin", "eval_dataset"),
        ),
        ("none",),
    ),
}

# Values that say what is done here anyway.
HARMLESS = {
    "task_type": ("causal_lm",),
    "optim": ("adamw_torch", "adamw_torch_fused"),
    "save_strategy": ("steps", "no"),
    "eval_strategy": ("steps", "no"),
    "model_kwargs": ("{}",),
    "per_device_eval_batch_size": None,  # any: evaluation gives the same loss
}


def _deepspeed(values: list[str]) -> Ours:
    """`zero0` to `zero3`, or a file in DeepSpeed's form."""
    text = values[0] if values else ""
    if text.startswith("zero") and text[4:].removesuffix("_offload") in ("0", "1", "2", "3"):
        stage, offload = text[4], text.endswith("_offload")
    else:
        try:
            content = json.loads(text if text.startswith("{") else Path(text).expanduser().read_text(encoding="utf-8"))
            section = content.get("zero_optimization", {})
            stage = str(section.get("stage", 0))
            offload = any(
                (section.get(f"offload_{what}") or {}).get("device", "none") != "none"
                for what in ("optimizer", "param")
            )
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"--deepspeed {text} is none of zero0 to zero3, and no DeepSpeed file: {error}."
            ) from None
    if offload:
        raise ConfigError(
            f"--deepspeed {text} moves state to the host's memory, which is not built yet. Take zero{stage}; stage 3 "
            "spreads everything over all processes."
        )
    return [("stage", [stage])]


def _checkpointing(values: list[str]) -> Ours:
    try:
        wanted = json.loads(" ".join(values))
        unknown = set(wanted) - {"use_reentrant"}
    except (ValueError, TypeError):
        raise ConfigError(f"--gradient-checkpointing-kwargs {' '.join(values)} is no JSON object.") from None
    if unknown:
        raise ConfigError(f"--gradient-checkpointing-kwargs: {', '.join(sorted(unknown))} has no equivalent here.")
    return [("checkpointing_reentrant", ["yes" if wanted.get("use_reentrant") else "no"])]


def _columns(values: list[str]) -> Ours:
    """Swift maps a file's column to its field; here a field names its column."""
    try:
        return [("columns", [f"{field}={column}" for column, field in json.loads(" ".join(values)).items()])]
    except (ValueError, AttributeError):
        return [("columns", values)]  # in our own form


def _rpo(values: list[str]) -> Ours:
    """DPO plus so much of learning the better answer: two losses of TRL's."""
    if not values or values[0].lower() == "none":
        return []
    return [("loss_type", ["sigmoid", "sft"]), ("loss_weights", ["1", *values])]


# The towers are one for Swift.
TOWERS = {"llm": ["llm"], "vit": ["vision", "audio"], "aligner": ["aligner"]}


def _freeze(name: str, values: list[str]) -> Ours:
    frozen = not values or values[0].lower() in ("true", "yes", "1")
    return [("freeze", TOWERS[name])] if frozen else []


def _rate(name: str, values: list[str]) -> Ours:
    if not values or values[0].lower() == "none":
        return []
    return [("part_learning_rates", [f"{part}={values[0]}" for part in TOWERS[name]])]


# Options that several of Swift's add to.
ADDED = ("freeze", "part_learning_rates")

SPECIAL: dict[str, Callable[[list[str]], Ours]] = {
    "deepspeed": _deepspeed,
    "gradient_checkpointing_kwargs": _checkpointing,
    "columns": _columns,
    "rpo_alpha": _rpo,
    **{f"freeze_{name}": partial(_freeze, name) for name in TOWERS},
    **{f"{name}_lr": partial(_rate, name) for name in ("vit", "aligner")},
}


def ours(name: str, values: Sequence[str], known: Collection[str]) -> Ours | str | None:
    """What an option of Swift is here.

    Args:
        name: with underscores, without hyphens in front.
        known: our options, in the same spelling.

    Returns: our options and their values; a text that says why it has no effect here; None for an option that is ours
        as it stands, or nobody's.

    Raises:
        ConfigError: it asks for what does not exist here.
    """
    given = [str(value) for value in values]
    if name in SPECIAL:
        found = SPECIAL[name](given)
        if all(option in known for option, _ in found):
            return found
    target = RENAMED.get(name)
    if target in known:
        meant = VALUES.get(str(target), {})
        return [(str(target), [meant.get(value.lower(), value) for value in given])]
    if name in known:
        return None
    if name in WITHOUT_EFFECT:
        return WITHOUT_EFFECT[name]
    if name in MISSING or target is not None:
        nothing = {*MISSING.get(name, ()), *(HARMLESS.get(name) or ())}
        any_value = name in HARMLESS and HARMLESS[name] is None
        if any_value or " ".join(given).lower() in nothing:
            return "that is what happens here"
        raise ConfigError(
            f"--{name.replace('_', '-')} {' '.join(given)}: an option of ms-swift without equivalent here."
        )
    return None


def meant_as_ours(known: Collection[str], given: Collection[str]) -> Collection[str]:
    """Without plugins, `model_type` is Swift's, in whose commands it says what the model's config says here."""
    return known if "external_plugins" in given else [name for name in known if name != "model_type"]


def adopted(argv: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """A command line in which Swift's options have our names.

    Args:
        argv: options with hyphens, `--name value ...` or `--name=value`.
        known: our options, with underscores.

    Returns: the command line, and what in it has no effect here.

    Raises:
        ConfigError: an option of Swift has no equivalent, or stands beside ours that means the same.
    """
    known = meant_as_ours(known, [word.partition("=")[0][2:].replace("-", "_") for word in argv])
    words: list[str] = []
    notes: list[str] = []
    said: dict[str, str] = {}
    added: dict[str, list[str]] = {}
    at = 0
    while at < len(argv):
        word = argv[at]
        at += 1
        if not word.startswith("--"):
            words.append(word)
            continue
        flag, has_value, value = word.partition("=")
        values = [value] if has_value else []
        while not has_value and at < len(argv) and not argv[at].startswith("--"):
            values.append(argv[at])
            at += 1
        name = flag[2:].replace("-", "_")
        found = ours(name, values, known)
        if isinstance(found, str):
            notes.append(f"{flag} ({found})")
            continue
        for option, meant in found if found is not None else [(name, values)]:
            if option in ADDED:
                added.setdefault(option, []).extend(meant)
                continue
            other = said.setdefault(option, flag)
            if other != flag:
                raise ConfigError(f"{other} and {flag} are the same option. Give one of them.")
            words += ["--" + option.replace("_", "-"), *meant]
    for option, meant in added.items():
        words += ["--" + option.replace("_", "-"), *meant]
    return words, notes


def from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The options that Swift's users give as variables."""
    return {option: environment[name] for name, option in VARIABLES.items() if environment.get(name)}
