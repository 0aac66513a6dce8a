"""Activation checkpointing by its name in either release: transformers 5.24 has a new name, and 6 drops the old one."""

from __future__ import annotations

from typing import Any

OLD, NEW = "gradient_checkpointing", "activation_checkpointing"


def checkpointing_name(model: Any) -> str:
    """What the methods and arguments of this model begin with."""
    return NEW if hasattr(model, f"{NEW}_enable") else OLD


def enable_checkpointing(model: Any, reentrant: bool) -> None:
    """Have the layers of a model of transformers compute their activations again in backward."""
    name = checkpointing_name(model)
    getattr(model, f"{name}_enable")(**{f"{name}_kwargs": {"use_reentrant": reentrant}})


def checkpointing_arguments(on: bool, reentrant: bool) -> dict[str, Any]:
    """The same as arguments of `TrainingArguments`."""
    from transformers import TrainingArguments

    name = NEW if hasattr(TrainingArguments, NEW) else OLD
    return {name: on, f"{name}_kwargs": {"use_reentrant": reentrant}}
