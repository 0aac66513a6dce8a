"""ms-swift's variables as our options: those before an ms-swift command, in a file's ENV, in --model_kwargs, and those
in the environment of our commands."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from shardproof.cli.from_swift.missing import missing
from shardproof.errors import ConfigError
from shardproof.train.options.option import flag

# Variables that are options here.
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
OF_SWIFT = {**VARIABLES, "FPS": "fps"}  # in its commands only: elsewhere the name may belong to anything
HUB = "USE_HF"

# Variables with a fixed meaning here: the values that ask for it.
ONLY = {
    "QWENVL_BBOX_FORMAT": ("legacy",),
    "GENERATIVE_RERANKER_POSITIVE_TOKEN": ("yes",),
    "GENERATIVE_RERANKER_NEGATIVE_TOKEN": ("no",),
    "INFONCE_USE_BATCH": ("true", "1"),
    "LISTWISE_RERANKER_MIN_GROUP_SIZE": ("2",),
    "INIT_AUDIO": ("true", "1"),
    "STACK_FRAMES": ("1",),
}
# Variables that change what ms-swift's templates and losses take from a row, and that are not read here. The names in
# COMMON may belong to anything, so they are reported for ms-swift commands only.
UNREAD = (
    *("IMAGE_FACTOR", "FRAME_FACTOR", "SPATIAL_MERGE_SIZE", "MIN_PIXELS", "USE_AUDIO_IN_VIDEO", "FPS_MIN_FRAMES"),
    *("VIDEO_MIN_PIXELS", "VIDEO_TOTAL_PIXELS", "VIDEO_MAX_NUM", "VIDEO_SEGMENTS"),
    *("IMAGE_MIN_TOKEN_NUM", "VIDEO_MIN_TOKEN_NUM", "NFRAMES"),
    *("MAX_SLICE_NUMS", "VIDEO_MAX_SLICE_NUMS", "MAX_NUM_FRAMES", "MAX_PARTITION", "DOWNSAMPLE_MODE"),
    *("INFONCE_HARD_NEGATIVES", "INFONCE_MASK_FAKE_NEGATIVE", "INFONCE_INCLUDE_QQ", "INFONCE_INCLUDE_DD"),
)
COMMON = (
    *("MAX_RATIO", "MAX_NUM", "INPUT_SIZE", "SAMPLING_RATE", "HD_NUM", "NUM_FRAMES", "NUM_CROPS", "N_MELS"),
    *("CROP_MODE", "BASE_SIZE", "IMAGE_SIZE", "INIT_TTS", "SPEAKER_NAME"),
    *("REASONING_EFFORT", "THINKING_MODE", "THINKING_BUDGET"),
)
_OF_FILES = (
    "--max-pixels, --max-frame-pixels, --max-frames and --fps limit how much of a file is used, --max-image-tokens and "
    "--max-frame-tokens how many tokens it becomes"
)
# What to do instead, by the beginning of the name.
_INSTEAD = {
    "INFONCE_": "each question is compared with all positives and negatives of a step",
    "USE_AUDIO_IN_VIDEO": "only the frames of a video are used; a row's 'audios' may name its audio",
    "SPEAKER_NAME": "talkers are trained on the model's first voice",
    **dict.fromkeys(
        ("REASONING_", "THINKING_"), "--template-variables sets the variables of the model's chat template"
    ),
}

# Variables with the same name and meaning everywhere.
_SAME = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONPATH")
_OF_LIBRARIES = (
    *("PYTORCH_", "TORCH_", "NCCL_", "GLOO_", "TRITON_", "HF_", "TOKENIZERS_", "MODELSCOPE_"),
    *("WANDB_", "SWANLAB_", "MLFLOW_", "TRACKIO_", "VLLM_", "RAY_", "ASCEND_", "HCCL_"),
)


def of_environment(environment: Mapping[str, str], exported: Collection[str], notes: list[str]) -> dict[str, str]:
    """Our options for the variables of an ms-swift command.

    Args:
        environment: the variables by name.
        exported: those that the command would see; others may be for the script alone.
        notes: collects remarks about them.
    """
    for name, value in environment.items():
        shown = f"{name}={value if not name.endswith(('_KEY', '_TOKEN')) else '...'}"
        if name in _SAME or name.startswith(_OF_LIBRARIES):
            notes.append(f"{shown} means the same here: put it before the command")
        elif name in exported and value and name not in (*OF_SWIFT, *ONLY, *UNREAD, *COMMON, HUB):
            notes.append(f"{shown} is left out: no option here corresponds to it")
    return from_environment(environment, OF_SWIFT)


def from_environment(environment: Mapping[str, str], known: Mapping[str, str] = VARIABLES) -> dict[str, str]:
    """Our options for variables that ms-swift users set.

    Raises:
        ConfigError: two variables are the same option here, and have different values.
    """
    said: dict[str, str] = {}
    found = set_in(environment, known)
    for name, option in found.items():
        if environment[name] != said.get(option, environment[name]):
            pair = " and ".join(f"{one}={environment[one]}" for one, its in found.items() if its == option)
            raise ConfigError(f"The variables {pair} are the same option here, {flag(option)}. Unset one of them.")
        said[option] = environment[name]
    return said


def set_in(environment: Mapping[str, str], known: Mapping[str, str] = VARIABLES) -> dict[str, str]:
    """The variables of `known` that have a value."""
    return {name: option for name, option in known.items() if environment.get(name)}


def of_anybody(environment: Mapping[str, str]) -> list[str]:
    """Variables in the environment of our commands that would mean something to ms-swift, but are not read here."""
    read = {name: f"give {flag(option)} instead" for name, option in OF_SWIFT.items()}
    return [
        f"the variable {name}={environment[name]} ({read.get(name, 'unread')})"
        for name in ("FPS", *COMMON)
        if environment.get(name)
    ]


def other_meanings(environment: Mapping[str, str], of_swift: bool = False) -> list[str]:
    """Variables of ms-swift that ask for something not done here, and what is done instead; `of_swift`: all of them are
    meant for ms-swift."""
    unread = [name for name in (*UNREAD, *(COMMON if of_swift else ())) if environment.get(name, "")]
    return [
        *(
            f"{name}={environment[name]}: here it is always {values[0]!r}"
            for name, values in ONLY.items()
            if environment.get(name, "").lower() not in ("", *values)
        ),
        *(
            f"{name}={environment[name]}: it is not read here; {_instead(name)}"
            for name in unread
            if environment[name].lower() not in ("0", "false", "none")
        ),
    ]


def _instead(name: str) -> str:
    return next((text for start, text in _INSTEAD.items() if name.startswith(start)), _OF_FILES)


def of_model_kwargs(values: list[str]) -> list[tuple[str, list[str]]]:
    """`--model_kwargs`: the same variables, in a JSON object."""
    text = " ".join(values)
    if text.lower() in ("", "none"):
        return []
    try:
        said = {name.upper(): str(v).lower() if isinstance(v, bool) else str(v) for name, v in json.loads(text).items()}
    except (ValueError, AttributeError):
        raise ConfigError(f"--model-kwargs {text} is not a JSON object.") from None
    for reason in other_meanings(said, of_swift=True):
        raise missing(f"--model-kwargs {reason}")
    for name in said:
        if name not in (*OF_SWIFT, *ONLY, *UNREAD, *COMMON):
            raise missing(f"--model-kwargs {name}={said[name]}", _OF_FILES)
    return [(option, [value]) for option, value in from_environment(said, OF_SWIFT).items()]
