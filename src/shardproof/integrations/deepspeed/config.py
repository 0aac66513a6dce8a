"""Reading a DeepSpeed JSON: its settings, the keys without meaning here, and the arithmetic of batch sizes."""

from __future__ import annotations

import base64
import binascii
import difflib
import functools
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, ValidationError

from shardproof.errors import ConfigError
from shardproof.integrations.deepspeed.sections import Section, Settings
from shardproof.zero.comm.world import is_first

log = logging.getLogger("shardproof")

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Batch:
    """How many rows a step takes: `train` = `micro` x `accumulation` x ranks."""

    train: int
    micro: int
    accumulation: int


def read(config: str | os.PathLike[str] | dict[str, Any]) -> tuple[Settings, list[str]]:
    """Read a DeepSpeed configuration: a dict, a JSON file, or a JSON text in base64.

    Returns: the settings, and the names of keys that are set but have no meaning here.

    Raises:
        ConfigError: a key is unknown (with the nearest known one) or invalid, or ignoring it would silently change what
            is trained.
    """
    raw, where = _load(config)
    problems: list[str] = []
    unused: list[str] = []
    values = _sift(raw, Settings, "", problems, unused)
    if not problems:
        try:
            return Settings.model_validate(values), unused
        except ValidationError as error:
            for entry in error.errors():
                name = ".".join(str(part) for part in entry["loc"])
                problems.append(f"{name or 'it'}: {entry['msg'].removeprefix('Value error, ')}{_given(entry)}")
    lines = "\n  ".join(problems)
    raise ConfigError(f"The DeepSpeed configuration{where} cannot be used:\n  {lines}")


def batch(settings: Settings, ranks: int) -> Batch:
    """Work out the batch sizes that are not given, as DeepSpeed does.

    Raises:
        ConfigError: neither train_batch_size nor train_micro_batch_size_per_gpu is given, or they contradict each
            other.
    """
    train, micro, steps = (getattr(settings, key) for key in _BATCH_KEYS)
    if train is None and micro is None:
        raise ConfigError(
            "The DeepSpeed configuration gives neither train_batch_size nor train_micro_batch_size_per_gpu "
            '("auto" is filled in by a Trainer; in your own loop give a number).'
        )
    if micro is None:
        steps = steps or 1
        micro = train // ranks // steps
    elif steps is None:
        steps = 1 if train is None else train // micro // ranks
    train = train or micro * steps * ranks
    if not micro or not steps:
        raise ConfigError(f"train_batch_size {train} is too small for {ranks} ranks{_with(settings)}.")
    if micro * steps * ranks != train:
        raise ConfigError(
            f"train_batch_size {train} is not train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks "
            f"({micro} x {steps} x {ranks} = {micro * steps * ranks}). Leave one of them out to have it computed."
        )
    return Batch(train, micro, steps)


def _with(settings: Settings) -> str:
    given = [f"{key} {getattr(settings, key)}" for key in _BATCH_KEYS[1:] if getattr(settings, key)]
    return f" with {' and '.join(given)}" if given else ""


@functools.cache
def say_once(text: str) -> None:
    """Log one line about keys that are not applied, on rank 0, only once per file."""
    if is_first():
        log.warning(text)


# --- loading ----------------------------------------------------------------------------------------


def _load(config: Any) -> tuple[dict[str, Any], str]:
    if isinstance(config, dict):
        return config, ""
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(f"A DeepSpeed configuration must be a dict or the path of a JSON file, not {config!r}.")
    path = Path(config)
    if os.path.isfile(path):  # Path.is_file would raise for a long base64 text
        text, where = path.read_text(encoding="utf-8"), f" {path}"
    else:
        try:
            text, where = base64.urlsafe_b64decode(str(config)).decode(), ""
        except (binascii.Error, UnicodeDecodeError, ValueError):
            raise ConfigError(f"There is no DeepSpeed configuration at {path}.") from None
    try:
        raw = json.loads(text, object_pairs_hook=_no_key_twice)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where.strip() or 'The text'}:{error.lineno}: not JSON: {error.msg}.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"The DeepSpeed configuration{where} holds a {type(raw).__name__}, not an object.")
    return raw, where


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError(f"The DeepSpeed configuration gives {', '.join(map(repr, twice))} twice.")
    return dict(pairs)


# --- sorting keys -----------------------------------------------------------------------------------


def _sift(raw: dict[str, Any], section: type[Section], prefix: str, problems: list[str], unused: list[str]) -> Any:
    """The entries of `raw` that `section` reads; "auto" counts as not given."""
    fields = {name: f for field_name, f in section.model_fields.items() for name in _names(field_name, f)}
    known = {*fields, *section.unused, *section.silent, *section.refused}
    values: dict[str, Any] = {}
    for key, value in raw.items():
        name = f"{prefix}{key}"
        if key in fields:
            inner = _section_in(fields[key].annotation)
            if value is None or value == "auto":
                continue
            if key == "zero_optimization" and isinstance(value, bool):  # the format of early releases
                value = {"stage": int(value)}
            if inner is not None and isinstance(value, dict):
                value = _sift(value, inner, f"{name}.", problems, unused)
            values[key] = value
        elif key in section.unused:
            if _on(value):
                unused.append(name)
        elif key in section.refused:
            if _on(value) and value not in ("mean", 1):
                problems.append(f"{name} {section.refused[key]}")
        elif key not in section.silent:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            problems.append(f"{name} is unknown{f'; did you mean {prefix}{near[0]}?' if near else ''}")
    return values


def _names(field_name: str, field: Any) -> list[str]:
    alias = field.validation_alias
    return [str(choice) for choice in alias.choices] if isinstance(alias, AliasChoices) else [field_name]


def _section_in(annotation: Any) -> type[Section] | None:
    options = (annotation, *getattr(annotation, "__args__", ()))
    return next((o for o in options if isinstance(o, type) and issubclass(o, Section)), None)


def _on(value: Any) -> bool:
    """Whether a value enables something."""
    if isinstance(value, dict):
        return _on(value["enabled"]) if "enabled" in value else any(_on(v) for v in value.values())
    return value not in (None, False, 0, "auto", "none", "", [])


def _given(entry: Any) -> str:
    value = entry.get("input")
    return "" if isinstance(value, dict) else f" (given {value!r})"
