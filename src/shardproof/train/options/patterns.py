"""Options that are regular expressions, checked before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from shardproof.errors import ConfigError
from shardproof.train.options.option import flag

SPECIAL = re.compile(r"[\\^$*+?()\[\]{}|]")


def whole_names(targets: Sequence[str]) -> str | None:
    """The regular expression given as --target-modules, or None if it lists names."""
    return targets[0] if len(targets) == 1 and SPECIAL.search(targets[0]) else None


def check_patterns(config: Any) -> None:
    """Raise ConfigError for an invalid one, with the position of the error. `config`: the options of a run or of its
    plan."""
    pattern = whole_names(config.target_modules)
    given = [("target_modules", pattern)] if pattern else []
    for option in ("freeze_parameters", "trainable_parameters"):
        given += [(option, pattern) for pattern in getattr(config, option)]
    for option, pattern in given:
        check_pattern(flag(option), pattern)


def check_pattern(option: str, pattern: str) -> None:
    """Raise ConfigError if this value of an option is not a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{option} {pattern} is not a regular expression: {error}.") from error
