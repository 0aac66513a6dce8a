"""Options of ms-swift 4, under the names that they have here.

An option that both have under one name is not listed. What Swift calls differently, writes differently or does by
default stands here, so that its commands run as they are, or are refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from shardproof.cli.from_swift.missing import HARMLESS, INSTEAD, MISSING, WITHOUT_EFFECT, missing
from shardproof.cli.from_swift.values import ADDED, RL, SPECIAL, Ours
from shardproof.errors import ConfigError
from shardproof.train.options.option import flag

RENAMED = {
    "llamapro_num_new_blocks": "new_blocks",
    "model_id_or_path": "model",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "per_device_batch_size",
    "batch_size": "per_device_batch_size",
    "lr_scheduler_type": "lr_scheduler",
    "split_dataset_ratio": "val_split",
    "dataloader_drop_last": "drop_last",
    "resume_from_checkpoint": "resume",
    "overwrite_output_dir": "overwrite",
    "custom_register_path": "external_plugins",
    "full_determinism": "deterministic",
    "attn_impl": "attn",
    "truncation_strategy": "truncation",
    "sequence_parallel_size": "sequence_parallel",
    "metric": "metrics",
    "eval_metric": "metrics",
    "torch_dtype": "precision",
    "torch_compile": "compile",
    "use_liger_kernel": "liger_kernel",
    "top_k": "top_k",  # with other values
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
    "ref_model_sync_steps": "sync_ref_steps",
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
    "bad_rows": {"true": "stop", "false": "skip"},
    "attn": {"flash_attn": "flash_attention_2"},
    "top_k": {"-1": "0"},
    "best_metric": {"rouge-l": "rouge_l", "bleu-4": "bleu"},
}

# Variables that have one meaning here.
ONLY = {
    "QWENVL_BBOX_FORMAT": "legacy",
    "GENERATIVE_RERANKER_POSITIVE_TOKEN": "yes",
    "GENERATIVE_RERANKER_NEGATIVE_TOKEN": "no",
}
# Those by which its templates and losses take something else of a row, and that nothing here reads. Of the second ones,
# whose names may be of anything, only a command of Swift's is told.
UNREAD = (
    *("IMAGE_FACTOR", "FRAME_FACTOR", "SPATIAL_MERGE_SIZE", "MIN_PIXELS", "USE_AUDIO_IN_VIDEO", "FPS_MIN_FRAMES"),
    *("VIDEO_MIN_PIXELS", "VIDEO_TOTAL_PIXELS", "VIDEO_MAX_NUM", "VIDEO_SEGMENTS"),
    *("IMAGE_MIN_TOKEN_NUM", "VIDEO_MIN_TOKEN_NUM"),
    *("MAX_SLICE_NUMS", "VIDEO_MAX_SLICE_NUMS", "MAX_NUM_FRAMES", "MAX_PARTITION"),
    "INFONCE_HARD_NEGATIVES",
)
COMMON = "MAX_RATIO", "MAX_NUM", "INPUT_SIZE", "SAMPLING_RATE", "HD_NUM", "NUM_FRAMES", "NUM_CROPS", "N_MELS"
OF_FILES = (
    "--max-pixels, --max-frame-pixels, --max-frames and --fps say how much of a file is taken, --max-image-tokens and"
    " --max-frame-tokens how many tokens it becomes at most"
)

RPO = "--rpo-alpha"  # adds a loss to that of another option

# Options that are variables there.
VARIABLES = {
    "NPROC_PER_NODE": "nproc",
    "MAX_PIXELS": "max_pixels",
    "ROOT_IMAGE_DIR": "media_root",
    "VIDEO_MAX_PIXELS": "max_frame_pixels",
    "IMAGE_MAX_TOKEN_NUM": "max_image_tokens",
    "VIDEO_MAX_TOKEN_NUM": "max_frame_tokens",
    "FPS_MAX_FRAMES": "max_frames",
    "ENABLE_AUDIO_OUTPUT": "enable_audio_output",
    "MAX_POSITIVE_SAMPLES": "max_positives",
    "MAX_NEGATIVE_SAMPLES": "max_negatives",
    "INFONCE_TEMPERATURE": "loss_temperature",
    "LISTWISE_RERANKER_TEMPERATURE": "loss_temperature",
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


# By the beginning of their names, options that belong to something that is not here as a whole.
OF_A_KIND = {
    "galore_": " --optimizer galore takes --optimizer-arguments rank=64,update_gap=50,scale=1.0.",
    "lora_ga_": " It says how adapters begin by rows of data: --init-lora-weights takes other ways.",
    **dict.fromkeys(
        ("llamapro_", "reft_", "adapter_"),
        " It is of a tuner of ms-swift that is not here: --tuner takes PEFT's, with --tuner-arguments.",
    ),
    "swanlab_": " SwanLab reads it from a variable of its own: SWANLAB_PROJ_NAME, SWANLAB_EXP_NAME, SWANLAB_MODE ...",
    **dict.fromkeys(
        ("sglang_", "lmdeploy_"), " Answers are generated by the model itself, or by a vLLM server of its own."
    ),
    **dict.fromkeys(
        ("cosine_m", "repetition_n_", "repetition_max_", "soft_max_", "soft_cache_"),
        " Rewards of that kind are functions of your own: --reward-funcs FILE.py:FUNCTION.",
    ),
}

VLLM = (
    " A vLLM server takes its options itself: start it with 'vllm serve', then --use-vllm --vllm-server URL."
    " One in the processes takes --vllm-gpu-memory-utilization, --vllm-max-model-len, --vllm-tensor-parallel-size,"
    " --vllm-sleep."
)


def names(known: Collection[str]) -> list[str]:
    """Every option of Swift that does something in a command with these options, all with underscores."""
    renamed = [theirs for theirs, option in RENAMED.items() if option in known]
    special = [theirs for theirs in SPECIAL if theirs not in MISSING and ("trl_arguments" in known or theirs not in RL)]
    return [*renamed, *special]


def is_known(name: str, known: Collection[str]) -> bool:
    """Whether an option of Swift has its place in a command with these options."""
    return name == "deepspeed" or name in SPECIAL or RENAMED.get(name) in known


def hint(name: str) -> str:
    """What to do instead of an option that is nobody's here, or nothing."""
    if name.startswith("vllm_"):
        return VLLM
    return next((text for start, text in OF_A_KIND.items() if name.startswith(start)), "")


def ours(
    name: str,
    values: Sequence[str],
    known: Collection[str],
    notes: list[str] | None = None,
    others: Collection[str] = (),
) -> Ours | str | None:
    """What an option of Swift is here.

    Args:
        name: with underscores, without hyphens in front.
        known: our options, in the same spelling.
        notes: takes what has no effect in the file that an option names.
        others: options of our other commands.

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
    if target in known:
        meant = VALUES.get(str(target), {})
        words = given or ["true"] * ("true" in meant)  # a switch there, and a word here
        return [(str(target), [meant.get(value.lower(), value) for value in words])]
    if name in known:
        return None
    if name in WITHOUT_EFFECT:
        return WITHOUT_EFFECT[name]
    if name in MISSING or target is not None:
        nothing = {*MISSING.get(name, ()), *(HARMLESS.get(name) or ())}
        any_value = name in HARMLESS and HARMLESS[name] is None
        if any_value or " ".join(given).lower() in nothing:
            return "that is what happens here"
        if name in others and name not in INSTEAD:
            return None
        said = given if name != "hub_token" else []  # which is a secret
        raise missing(" ".join([flag(name), *said]), INSTEAD.get(name, ""))
    return None


def meant_as_ours(known: Collection[str], given: Collection[str]) -> Collection[str]:
    """Without plugins, `model_type` is Swift's, in whose commands it says what the model's config says here."""
    return known if "external_plugins" in given else [name for name in known if name != "model_type"]


def adopted(argv: Sequence[str], known: Collection[str], others: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """A command line in which Swift's options have our names.

    Args:
        argv: options with hyphens, `--name value ...` or `--name=value`.
        known: our options, with underscores.
        others: those of our other commands.

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
    for given, values in split_options(argv, words):
        name = given[2:].replace("-", "_")
        if given in flags:
            raise ConfigError(f"{given} stands there twice. Give it once; several values follow one option.")
        flags.add(given)
        found = ours(name, values, known, notes, others)
        if isinstance(found, str):
            notes.append(f"{given} ({found})")
            continue
        for option, meant in found if found is not None else [(name, values)]:
            if option in ADDED:
                added.setdefault(option, []).extend(meant)
            elif option not in said:
                said[option] = given, meant
                words += as_words(flag(option), meant)
            else:
                _check_agreement(option, said[option], (given, meant))
    for option, meant in added.items():
        words += as_words(flag(option), meant)
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


def as_words(flag: str, values: list[str]) -> list[str]:
    """An option and its values on a command line. One that begins as an option does is its value with `=` only."""
    return [f"{flag}={values[0]}"] if len(values) == 1 and values[0].startswith("-") else [flag, *values]


def _check_agreement(option: str, first: tuple[str, list[str]], second: tuple[str, list[str]]) -> None:
    """A file of DeepSpeed's may repeat what an option says, as under transformers; nothing else may."""
    flags = first[0], second[0]
    if RPO not in flags and ("--deepspeed" not in flags or option == "stage"):
        raise ConfigError(f"{flags[0]} and {flags[1]} are the same option. Give one of them.")
    from shardproof.cli.deepspeed_file import same

    if not same(first[1], second[1]):
        raise ConfigError(at_odds(option, first, second))


def at_odds(option: str, first: tuple[str, list[str]], second: tuple[str, list[str]]) -> str:
    """What to say of two of Swift's options, each with its values, that are one of ours."""
    texts = [f"{flag} says {' '.join(values)}" for flag, values in (first, second)]
    said = f"{flag(option)} has two values: {', '.join(texts)}."
    if RPO not in (first[0], second[0]):
        return f"{said} Leave one out."
    losses = " ".join(second[1] if first[0] == RPO else first[1])
    return f"{said} In place of {RPO} X, give all losses and weights: --loss-type {losses} sft --loss-weights 1 X."


def from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The options that Swift's users give as variables.

    Raises:
        ConfigError: two variables are one option here, and say two things.
    """
    said: dict[str, str] = {}
    for name, option in set_in(environment).items():
        if environment[name] != said.get(option, environment[name]):
            pair = " and ".join(
                f"{one}={environment[one]}" for one, its in set_in(environment).items() if its == option
            )
            raise ConfigError(f"The variables {pair} are one option here, {flag(option)}. Unset one of them.")
        said[option] = environment[name]
    return said


def set_in(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of VARIABLES that have a value."""
    return {name: option for name, option in VARIABLES.items() if environment.get(name)}


def other_meanings(environment: Mapping[str, str], of_swift: bool = False) -> list[str]:
    """Variables of Swift's that ask for what is not done here, and what is; `of_swift`: they are all for Swift."""
    unread = [name for name in (*UNREAD, *(COMMON if of_swift else ())) if environment.get(name, "")]
    return [
        *(
            f"{name}={environment[name]}: what happens here is {only!r}"
            for name, only in ONLY.items()
            if environment.get(name, only) != only
        ),
        *(
            f"{name}={environment[name]}: nothing here reads it"
            + ("; all positives and negatives of a row are taken" if "TIVE" in name else f"; {OF_FILES}")
            for name in unread
            if environment[name].lower() not in ("0", "false", "none")
        ),
    ]
