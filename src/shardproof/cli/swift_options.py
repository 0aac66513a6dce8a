"""Options of ms-swift 4, under the names that they have here.

An option that both have under one name is not listed. What Swift calls differently, writes differently or does by
default stands here, so that its commands run as they are, or are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from shardproof.cli.swift_missing import HARMLESS, INSTEAD, MISSING, WITHOUT_EFFECT
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
    "sequence_parallel_size": "sequence_parallel",
    "loss_scale": "loss",
    "loss_type": "loss",
    "metric": "metrics",
    "eval_metric": "metrics",
    "torch_dtype": "precision",
    "torch_compile": "compile",
    "use_liger_kernel": "liger_kernel",
    "use_rslora": "rslora",
    "use_dora": "dora",
    "strict": "bad_rows",
    "target_regex": "target_modules",
    "load_best_model_at_end": "keep_best",
    "metric_for_best_model": "best_metric",
    "early_stop_interval": "early_stop",
    "freeze_parameters_regex": "freeze_parameters",
    "trainable_parameters_regex": "trainable_parameters",
    "overlong_filter": "mask_truncated_completions",
    "num_ppo_epochs": "num_iterations",
    "response_length": "max_completion_length",
    "kl_coef": "beta",
    "cliprange": "epsilon",
    "lam": "gae_lambda",
    "vf_coef": "value_weight",
    "cliprange_value": "value_clip",
    "vllm_server_base_url": "vllm_server",
    "vllm_server_url": "vllm_server",
}

# Of our option, what Swift's values are called.
VALUES = {
    "precision": {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "half": "fp16"},
    "truncation": {"delete": "drop"},
    "loss": {"default": "answer", "pointwise_reranker": "pointwise", "listwise_reranker": "listwise"},
    "bad_rows": {"true": "stop", "false": "skip"},
    "attn": {"flash_attn": "flash_attention_2"},
}

LOSS_SCALES = {"default", "last_round", "all"}  # those that weigh every learnt token alike

# Options that are variables there.
VARIABLES = {
    "NPROC_PER_NODE": "nproc",
    "MAX_PIXELS": "max_pixels",
    "FPS_MAX_FRAMES": "max_frames",
    "ENABLE_AUDIO_OUTPUT": "enable_audio_output",
    "INFONCE_TEMPERATURE": "loss_temperature",
}


def _deepspeed(values: list[str], notes: list[str]) -> Ours:
    """`zero0` to `zero3`, or a file in DeepSpeed's form, of which `notes` takes what is not applied."""
    text = values[0] if values else ""
    if text.startswith("zero") and text[4:].removesuffix("_offload") in ("0", "1", "2", "3"):
        # Swift's files of these names offload the optimizer at stage 2, and parameters too at stage 3.
        offload = [("offload", ["all" if text[4] == "3" else "optimizer"])] if text.endswith("_offload") else []
        return [("stage", [text[4]]), *offload]
    from shardproof.cli.deepspeed_file import options_of

    found, unused = options_of(text)
    if unused:
        notes.append(f"of --deepspeed {text}, {', '.join(unused)}")
    return found


VLLM = " A vLLM server takes its options itself: start it with 'vllm serve', then --use-vllm --vllm-server URL."


def names() -> list[str]:
    """Every option of Swift that is known here, with underscores."""
    return list(dict.fromkeys([*RENAMED, *SPECIAL, *WITHOUT_EFFECT, *MISSING]))


def hint(name: str) -> str:
    """What to do instead of an option that is nobody's here, or nothing."""
    return VLLM if name.startswith("vllm_") else ""


def _precision(name: str, values: list[str]) -> Ours:
    """`--bf16 true` and `--fp16 true`."""
    on = not values or values[0].lower() in ("true", "yes", "1")
    return [("precision", [name])] if on else []


def _scheduler_kwargs(values: list[str]) -> Ours:
    text = " ".join(values)
    if not text.lstrip().startswith("{"):
        return [("lr_scheduler_kwargs", values)] if text.lower() != "none" else []  # in our own form
    try:
        found = json.loads(text, parse_float=str, parse_int=str)
    except ValueError:
        raise ConfigError(f"--lr-scheduler-kwargs {text} is no JSON object.") from None
    return [("lr_scheduler_kwargs", [f"{name}={value}" for name, value in found.items()])]


def _checkpointing(values: list[str]) -> Ours:
    try:
        wanted = json.loads(" ".join(values))
        unknown = set(wanted) - {"use_reentrant"}
    except (ValueError, TypeError):
        raise ConfigError(f"--gradient-checkpointing-kwargs {' '.join(values)} is no JSON object.") from None
    if unknown:
        raise ConfigError(f"--gradient-checkpointing-kwargs: {', '.join(sorted(unknown))} has no equivalent here.")
    return [("checkpointing_reentrant", ["yes" if wanted.get("use_reentrant") else "no"])]


def _sampling(values: list[str]) -> Ours:
    """transformers 5 calls it so, and Swift hands it on."""
    return [("group_by_length", ["yes"])] if values == ["group_by_length"] else []


# transformers' names of the optimizers that are here.
OPTIM = {
    "adamw_torch": "",
    "adamw_torch_fused": "",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "adafactor": "adafactor",
}


def _optim(values: list[str]) -> Ours:
    name = " ".join(values).lower()
    if name not in OPTIM and name != "none":
        raise ConfigError(
            f"--optim {name}: an option of ms-swift without equivalent here; there is"
            f" {', '.join(OPTIM)}, and another optimizer comes with --external-plugins and --optimizer."
        )
    found = OPTIM.get(name)
    return [("optimizer", [found])] if found else []


def _bits(values: list[str]) -> Ours:
    """Of a base, packed by bitsandbytes."""
    bits = " ".join(values).lower()
    if bits not in ("4", "none"):
        raise ConfigError(
            f"--quant-bits {bits}: an option of ms-swift without equivalent here; --quantize nf4 keeps a frozen base in"
            " four bits."
        )
    return [("quantize", ["nf4"])] if bits == "4" else []


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


def _thinking(values: list[str]) -> Ours:
    """A variable of the templates that know it."""
    value = " ".join(values).lower()
    return [("template_variables", [f"enable_thinking={value or 'true'}"])] if value != "none" else []


TASKS = ("causal_lm", "seq_cls", "embedding", "reranker")


def _task(values: list[str]) -> Ours:
    name = " ".join(values).lower()
    if name not in (*TASKS, "none"):
        raise ConfigError(
            f"--task-type {name}: an option of ms-swift without equivalent here; there is seq_cls, embedding and"
            " reranker."
        )
    return [("task", [name])] if name in TASKS else []


def _use_template(values: list[str]) -> Ours:
    """Without a template classifiers read plain text."""
    return [("plain", ["yes"])] if " ".join(values).lower() in ("false", "no", "0") else []


# The towers are one for Swift.
TOWERS = {"llm": ["llm"], "vit": ["vision", "audio"], "aligner": ["aligner"]}


def _freeze(name: str, values: list[str]) -> Ours:
    frozen = not values or values[0].lower() in ("true", "yes", "1")
    return [("freeze", TOWERS[name])] if frozen else []


def _rate(name: str, values: list[str]) -> Ours:
    if not values or values[0].lower() == "none":
        return []
    return [("part_learning_rates", [f"{part}={values[0]}" for part in TOWERS[name]])]


# Of rlhf, what TRL calls them.
OF_TRL = {
    "top_entropy_quantile": "top_entropy_quantile",
    "tau_pos": "sapo_temperature_pos",
    "tau_neg": "sapo_temperature_neg",
    "ref_model_mixup_alpha": "ref_model_mixup_alpha",
    "center_rewards_coefficient": "center_rewards_coefficient",
    "f_divergence_type": "f_divergence_type",
    "ld_alpha": "ld_alpha",
    "discopop_tau": "discopop_tau",
}


def _of_trl(name: str, values: list[str]) -> Ours:
    if not values or values[0].lower() == "none":
        return []
    return [("trl_arguments", [f"{name}={values[0]}"])]


# Options that several of Swift's add to.
ADDED = ("freeze", "part_learning_rates", "trl_arguments")

SPECIAL: dict[str, Callable[[list[str]], Ours]] = {
    "lr_scheduler_kwargs": _scheduler_kwargs,
    **{name: partial(_precision, name) for name in ("bf16", "fp16")},
    "gradient_checkpointing_kwargs": _checkpointing,
    "train_sampling_strategy": _sampling,
    "optim": _optim,
    "quant_bits": _bits,
    "columns": _columns,
    "rpo_alpha": _rpo,
    "enable_thinking": _thinking,
    "task_type": _task,
    "use_chat_template": _use_template,
    **{theirs: partial(_of_trl, trl) for theirs, trl in OF_TRL.items()},
    **{f"freeze_{name}": partial(_freeze, name) for name in TOWERS},
    **{f"{name}_lr": partial(_rate, name) for name in ("vit", "aligner")},
}


def ours(name: str, values: Sequence[str], known: Collection[str], notes: list[str] | None = None) -> Ours | str | None:
    """What an option of Swift is here.

    Args:
        name: with underscores, without hyphens in front.
        known: our options, in the same spelling.
        notes: takes what has no effect in the file that an option names.

    Returns: our options and their values; a text that says why it has no effect here; None for an option that is ours
        as it stands, or nobody's.

    Raises:
        ConfigError: it asks for what does not exist here.
    """
    given = [str(value) for value in values]
    if name == "deepspeed":
        return _deepspeed(given, [] if notes is None else notes)
    target = RENAMED.get(name)
    if name in SPECIAL:
        found = SPECIAL[name](given)
        if all(option in known for option, _ in found):
            return found
    if target in known and not (name == "loss_scale" and not LOSS_SCALES.issuperset(given)):
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
        instead = f"; {INSTEAD[name]}" if name in INSTEAD else ""
        raise ConfigError(
            f"--{name.replace('_', '-')} {' '.join(given)}: an option of ms-swift without equivalent here{instead}."
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
    said: dict[str, tuple[str, list[str]]] = {}
    added: dict[str, list[str]] = {}
    flags: set[str] = set()
    for flag, values in split_options(argv, words):
        name = flag[2:].replace("-", "_")
        if flag in flags:
            raise ConfigError(f"{flag} stands there twice. Give it once; several values follow one option.")
        flags.add(flag)
        found = ours(name, values, known, notes)
        if isinstance(found, str):
            notes.append(f"{flag} ({found})")
            continue
        for option, meant in found if found is not None else [(name, values)]:
            if option in ADDED:
                added.setdefault(option, []).extend(meant)
            elif option not in said:
                said[option] = flag, meant
                words += ["--" + option.replace("_", "-"), *meant]
            else:
                _check_agreement(option, said[option], (flag, meant))
    for option, meant in added.items():
        words += ["--" + option.replace("_", "-"), *meant]
    return words, notes


def split_options(argv: Sequence[str], words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Options and their values; `words` takes what stands in front of the first."""
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
        yield flag, values


def _check_agreement(option: str, first: tuple[str, list[str]], second: tuple[str, list[str]]) -> None:
    """A file of DeepSpeed's may repeat what an option says, as under transformers; nothing else may."""
    flags = first[0], second[0]
    if "--deepspeed" not in flags or option == "stage":
        raise ConfigError(f"{flags[0]} and {flags[1]} are the same option. Give one of them.")
    from shardproof.cli.deepspeed_file import same

    if not same(first[1], second[1]):
        texts = [f"{flag} says {' '.join(values)}" for flag, values in (first, second)]
        raise ConfigError(f"--{option.replace('_', '-')} has two values: {', '.join(texts)}. Leave one out.")


def from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The options that Swift's users give as variables."""
    return {option: environment[name] for name, option in VARIABLES.items() if environment.get(name)}
