"""The exceptions that reach users, and helpers for their messages.

This module imports nothing from shardproof, so that every package can use it."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable


class ShardproofError(Exception):
    """Base class of all errors raised on purpose: the message says what happened, where, and what to do."""


class EngineError(ShardproofError):
    """The engine was asked for something that cannot work."""


class DeviceError(EngineError):
    """A machine has fewer accelerators than processes."""


class StaleWeightsError(ShardproofError, RuntimeError):
    """Weights were changed between the forward pass that used them and its backward pass."""


class ChangedInPlaceError(ShardproofError, RuntimeError):
    """A tensor that backward needs was changed in place after the forward pass saved it."""


class NonFiniteError(ShardproofError, RuntimeError):
    """A loss, a gradient or a weight is NaN or infinite."""


class DesyncError(ShardproofError, RuntimeError):
    """The ranks' operations do not match, or one of the ranks is gone."""


class ConfigError(ShardproofError):
    """An option, a file or a folder named by the user cannot be used."""


class DataError(ShardproofError):
    """A row of the data cannot be used; the message names the file and line."""


class CheckpointError(ShardproofError):
    """A checkpoint cannot be written, is incomplete or damaged, or does not fit."""


def exported(path: object, option: str = "--model") -> str:
    """The command that exports a run, a checkpoint or adapters as a model, ready to be run as it is."""
    return f"shardproof export {shlex.quote(str(path))} FOLDER, then {option} FOLDER"


def did_you_mean(given: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A hint with the known name closest to a refused one, for the end of a message; or an empty string."""
    near = difflib.get_close_matches(given, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]}?" if near else ""
