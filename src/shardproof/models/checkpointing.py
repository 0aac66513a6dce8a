"""Activation checkpointing under either name: transformers 5.24 has a new one, and 6 drops the old one."""

from __future__ import annotations

from typing import Any

OLD, NEW = "gradient_checkpointing", "activation_checkpointing"


def checkpointing_name(model: Any) -> str:
    """The prefix of this model's methods and arguments for checkpointing."""
    return NEW if hasattr(model, f"{NEW}_enable") else OLD


def enable_checkpointing(model: Any, reentrant: bool) -> None:
    """Make the layers of a transformers model recompute their activations in backward."""
    name = checkpointing_name(model)
    getattr(model, f"{name}_enable")(**{f"{name}_kwargs": {"use_reentrant": reentrant}})


def checkpointing_arguments(on: bool, reentrant: bool) -> dict[str, Any]:
    """The same as arguments of `TrainingArguments`."""
    from transformers import TrainingArguments

    name = NEW if hasattr(TrainingArguments, NEW) else OLD
    return {name: on, f"{name}_kwargs": {"use_reentrant": reentrant}}
