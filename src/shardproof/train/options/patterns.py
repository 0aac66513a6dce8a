"""Options that are regular expressions, looked at before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from shardproof.errors import ConfigError
from shardproof.train.options.option import flag

SPECIAL = re.compile(r"[\\^$*+?()\[\]{}|]")


def whole_names(targets: Sequence[str]) -> str | None:
    """The regular expression that --target-modules is, or None where it is names."""
    return targets[0] if len(targets) == 1 and SPECIAL.search(targets[0]) else None


def check_patterns(config: Any) -> None:
    """Raise ConfigError for one that is none, with the place in it. `config`: the options of a run or of its plan."""
    pattern = whole_names(config.target_modules)
    given = [("target_modules", pattern)] if pattern else []
    for option in ("freeze_parameters", "trainable_parameters"):
        given += [(option, pattern) for pattern in getattr(config, option)]
    for option, pattern in given:
        check_pattern(flag(option), pattern)


def check_pattern(option: str, pattern: str) -> None:
    """Raise ConfigError where this value of an option is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{option} {pattern} is not a regular expression: {error}.") from error
