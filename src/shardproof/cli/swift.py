"""`shardproof swift "swift sft ..."`: the same run as a command of ours, and what it does not do."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from pydantic import BaseModel

from shardproof.cli.swift_options import ADDED, TOWERS, from_environment, meant_as_ours, ours
from shardproof.errors import ConfigError

# What `swift sft` and `swift rlhf` do unasked, where ours does something else.
DEFAULTS = {
    "tuner": "lora",
    "epochs": "3",
    "per_device_batch_size": "1",
    "weight_decay": "0.1",
    "warmup_ratio": "0",
    "gradient_checkpointing": "yes",
    "lora_rank": "8",
    "lora_dropout": "0.05",
    "logging_steps": "5",
    "bad_rows": "skip",
    "stage": "0",
    "precision": "bf16",
}
OF_RLHF = {
    "simpo": {"beta": "2.0", "simpo_gamma": "1.0"},
    "grpo": {"beta": "0.04", "num_generations": "8", "temperature": "0.9", "max_completion_length": "512"},
    "ppo": {"beta": "0.05", "temperature": "0.9", "max_completion_length": "512"},
    "gkd": {"beta": "0.5", "temperature": "0.9", "max_completion_length": "512"},
}
_SAME = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_LORA_ONLY = ("lora_rank", "lora_dropout")
_WHOLE_BATCH = 16

HELP = """usage: shardproof swift "swift sft|rlhf ..." | SCRIPT.sh

Print the command of ours that does what a command of ms-swift does, its defaults included, and what it leaves out.
"""


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code: 1 where something has no equivalent."""
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    text = argv[0] if len(argv) == 1 else shlex.join(argv)
    if len(argv) == 1 and Path(text).expanduser().is_file():
        text = Path(text).expanduser().read_text(encoding="utf-8")
    command, notes, missing = translate(text)
    print(command)
    for note in notes:
        print(f"# {note}")
    for reason in missing:
        print(f"not here: {reason}", file=sys.stderr)
    return 1 if missing else 0


def translate(text: str) -> tuple[str, list[str], list[str]]:
    """Returns our command, what is worth knowing about it, and what has no equivalent.

    Raises:
        ConfigError: the text holds no command `swift sft` or `swift rlhf`.
    """
    environment, command, arguments = _split(text)
    config = _config(command)
    known = meant_as_ours({*config.model_fields, "run_file"}, [name for name, _ in arguments])
    values: dict[str, list[str]] = {}
    notes: list[str] = []
    missing: list[str] = []
    for name, given in arguments:
        try:
            found = ours(name, given, known, notes)
            if isinstance(found, str):
                notes.append(f"--{name.replace('_', '-')} is left out: {found}")
            elif found is None and name not in known:
                missing.append(f"--{name.replace('_', '-')} {' '.join(given)}: unknown")
            else:
                for option, meant in found if found is not None else [(name, given)]:
                    values[option] = values.get(option, []) + meant if option in ADDED else meant
        except ConfigError as error:
            missing.append(str(error))
    for name, value in _from_environment(environment, notes).items():
        values.setdefault(name, [value])
    if looks_or_hears(values.get("model", [""])[0]):
        _freeze_towers(values, [name for name, _ in arguments])
    _add_defaults(values, known)
    words = ["shardproof", command]
    lines = [f"--{name.replace('_', '-')} {shlex.join(given)}".rstrip() for name, given in values.items()]
    return " \\\n    ".join([" ".join(words), *lines]), notes, missing


def _split(text: str) -> tuple[dict[str, str], str, list[tuple[str, list[str]]]]:
    """Variables in front of the command, which command it is, and its options with their values."""
    try:
        lines = [re.sub(r"(^|\s)#\s.*$|^#.*$", "", line) for line in text.splitlines()]
        words = shlex.split("\n".join(lines).replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError(f"This is no shell command: {error}.") from None
    starts = [i for i, word in enumerate(words[:-1]) if word == "swift" and words[i + 1] in ("sft", "rlhf", "pt")]
    if not starts:
        raise ConfigError("There is no 'swift sft' or 'swift rlhf' in this text.")
    if len(starts) > 1:
        raise ConfigError("There are several swift commands in this text. Give one at a time.")
    start = starts[0]
    if words[start + 1] == "pt":
        raise ConfigError(
            "'swift pt' trains on plain text: here 'shardproof sft --loss all' does, on rows of 'completion'."
        )
    environment = dict(word.split("=", 1) for word in words[:start] if "=" in word)
    options: list[tuple[str, list[str]]] = []
    for word in words[start + 2 :]:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            options.append((name.replace("-", "_"), [value] if value else []))
        elif options:
            options[-1][1].append(word)
        else:
            raise ConfigError(f"{word}: run files of ms-swift are not read. Give its options on the command line.")
    return environment, words[start + 1], options


def _config(command: str) -> type[BaseModel]:
    if command == "sft":
        from shardproof.train.config import SftConfig

        return SftConfig
    from shardproof.train.rlhf_config import RlhfConfig

    return RlhfConfig


def _from_environment(environment: dict[str, str], notes: list[str]) -> dict[str, str]:
    notes += [
        f"{name}={value} means the same here: put it in front" for name, value in environment.items() if name in _SAME
    ]
    return from_environment(environment)


def looks_or_hears(model: str) -> bool:
    """Whether the name of a model says that it takes more than text."""
    return bool(re.search(r"omni|audio|vision|llava|internvl|minicpm-?[vo]|gemma-?3|(^|[-_/.\d])vl", model.lower()))


def _freeze_towers(values: dict[str, list[str]], given: Collection[str]) -> None:
    """Swift trains towers and aligner only where it is told to."""
    frozen = [part for name in ("vit", "aligner") if f"freeze_{name}" not in given for part in TOWERS[name]]
    if frozen:
        values["freeze"] = [*values.get("freeze", []), *frozen]


def _add_defaults(values: dict[str, list[str]], known: Collection[str]) -> None:
    """Write out Swift's defaults that are not ours, so that the run is the same one."""
    kind = values.get("rlhf_type", ["dpo"])[0]
    for name, value in {**DEFAULTS, **OF_RLHF.get(kind, {})}.items():
        if name in known and not (name in _LORA_ONLY and values["tuner"] != ["lora"]):
            values.setdefault(name, [value])
    values.setdefault("learning_rate", ["1e-4" if values["tuner"] == ["lora"] else "1e-5"])
    if values["gradient_checkpointing"][:1] in (["yes"], ["true"], []):
        values.setdefault("checkpointing_reentrant", ["no" if values["stage"] == ["0"] else "yes"])
    if "gradient_accumulation_steps" not in values and "global_batch_size" not in values:
        at_once = int(values["per_device_batch_size"][0]) * int(values.get("nproc", ["1"])[0])
        values["gradient_accumulation_steps"] = [str(max(1, -(-_WHOLE_BATCH // at_once)))]
