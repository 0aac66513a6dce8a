"""The building blocks of the options of all commands."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field


def flag(name: str) -> str:
    """The option as a user writes it."""
    return "--" + name.replace("_", "-")


def first_given(config: BaseModel, names: Sequence[str]) -> str:
    """The first of these options that is not at its default, as a user writes it, or an empty string."""
    changed = [name for name in names if getattr(config, name) != type(config).model_fields[name].default]
    return flag(changed[0]) if changed else ""


def option(group: str, default: Any, description: str, values: str = "", **limits: Any) -> Any:
    """A field with its group in `--help`, and its values if the type does not show them."""
    return Field(default, description=description, json_schema_extra={"group": group, "values": values}, **limits)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


Finite = Annotated[float, AfterValidator(_finite)]


Named = Annotated[str, AfterValidator(os.path.expanduser)]  # a folder or a hub name; libraries do not expand `~`


def with_line_ends(text: str) -> str:
    return text.replace("\\n", "\n")


Written = Annotated[str, AfterValidator(with_line_ends)]  # a text in which the shell leaves `\n` unexpanded


def _at_commas(value: Any) -> Any:
    """`a,b` and `a b` are the same list."""
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        return value
    return [name.strip() for text in value for name in text.split(",") if name.strip()]


Names = Annotated[list[str], BeforeValidator(_at_commas)]


def _as_texts(pairs: Any) -> Any:
    """A YAML file may give numbers or booleans (`factor: 2`) where the command line gives text."""
    if not isinstance(pairs, dict):
        return pairs
    return {name: json.dumps(value) if isinstance(value, (int, float)) else value for name, value in pairs.items()}


Texts = Annotated[dict[str, str], BeforeValidator(_as_texts)]


def _as_values(pairs: Any) -> Any:
    """Converts texts of the command line to the numbers or booleans they stand for."""

    def value(text: Any) -> Any:
        known = {"true": True, "yes": True, "false": False, "no": False}
        try:
            return known[text.lower()] if text.lower() in known else json.loads(text)
        except (AttributeError, ValueError):
            return text

    return {name: value(text) for name, text in pairs.items()} if isinstance(pairs, dict) else pairs


Arguments = Annotated[dict[str, bool | int | float | str], BeforeValidator(_as_values)]
SWANLAB = "swanlab"  # its own callback is used: the one in transformers does not support releases since 0.8
REPORTS = ("none", "tensorboard", "wandb", SWANLAB, "mlflow", "trackio")  # where records go besides metrics.jsonl
BEGINNINGS = "gaussian, orthogonal, pissa, pissa_niter_N, olora"


def _beginning(value: str) -> str:
    if re.fullmatch(r"gaussian|orthogonal|pissa|pissa_niter_\d+|olora", value):
        return value
    why = {
        **dict.fromkeys(("eva", "corda", "lora_ga", "lora-ga"), ", which is computed from rows of data"),
        "loftq": ", which replaces weights by 4-bit ones",
        "mica": ", which trains only one of the two matrices",
    }
    raise ValueError(f"must be one of {BEGINNINGS}, not {value}{why.get(value, '')}")


Beginning = Annotated[str, AfterValidator(_beginning)]
Strategy = Annotated[  # YAML reads `no` as false
    Literal["steps", "epoch", "no"], BeforeValidator(lambda value: "no" if value is False else value)
]
SAVE_STEPS = 500  # for --save-strategy steps and --eval-strategy steps; the default of transformers and ms-swift
Task = Literal["causal_lm", "seq_cls", "embedding", "reranker", "generative_reranker"]
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
Scheduler = Literal[
    "linear",
    "cosine",
    "constant",
    "constant_with_warmup",
    "cosine_with_min_lr",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
]
