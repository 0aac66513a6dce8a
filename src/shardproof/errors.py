"""The exceptions that reach users, and commands that their texts name.

This module imports nothing of ours, so that every room may use it."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable


class ShardproofError(Exception):
    """Base of every error raised on purpose: its text says what happened, where, and what to do."""


class EngineError(ShardproofError):
    """The engine was asked for something that cannot work."""


class DeviceError(EngineError):
    """A machine has fewer accelerators than processes."""


class StaleWeightsError(ShardproofError, RuntimeError):
    """Weights were changed between the forward pass that used them and its backward pass."""


class ChangedInPlaceError(ShardproofError, RuntimeError):
    """A tensor that backward needs was changed in place since the forward pass kept it."""


class NonFiniteError(ShardproofError, RuntimeError):
    """A loss, a gradient or a weight is NaN or infinite."""


class DesyncError(ShardproofError, RuntimeError):
    """The ranks do things that do not fit together, or one of them is gone."""


class ConfigError(ShardproofError):
    """An option, a file or a folder named by the user cannot be used."""


class DataError(ShardproofError):
    """A row of the data cannot be used; the text names file and line."""


class CheckpointError(ShardproofError):
    """A checkpoint cannot be written, is not complete or damaged, or does not fit."""


def exported(path: object, option: str = "--model") -> str:
    """The command that makes a model of a run, a checkpoint or adapters, to be typed as it stands."""
    return f"shardproof export {shlex.quote(str(path))} FOLDER, then {option} FOLDER"


def did_you_mean(given: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """At the end of a sentence that refuses a name: which of those that are known is near, or nothing."""
    near = difflib.get_close_matches(given, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]}?" if near else ""
