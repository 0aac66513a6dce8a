"""ms-swift's files of options, YAML or JSON, given as the first argument of a command or with --config."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from shardproof.cli.yaml_file import entries, named
from shardproof.errors import ConfigError

ENDS = (".yaml", ".yml", ".json")
LITERAL = "\x03"  # stands for a literal dollar
VARIABLES = "ENV"  # the entry of a file that holds variables


def read(path: str) -> tuple[list[tuple[str, list[str]]], dict[str, str]]:
    """The options of a file, in command-line form, and its variables.

    Raises:
        ConfigError: there is no such file, or it holds no options.
    """
    options, variables = [], dict[str, str]()
    for name, value in _entries(path):
        if name != VARIABLES:
            words = [_word(one) for one in (value if isinstance(value, list) else [value])]
            options.append((name.replace("-", "_"), words))
        elif isinstance(value or {}, dict):
            variables = {variable: _word(said) for variable, said in (value or {}).items()}
        else:
            raise ConfigError(f"{path}: {VARIABLES} holds variables by their names, such as 'NPROC_PER_NODE: 2'.")
    return options, variables


def _entries(path: str) -> Iterable[tuple[str, Any]]:
    if not path.endswith(".json"):
        return ((name, value) for _, name, _, value in entries(path))
    try:  # YAML forbids leading tabs, and keeps surrogates apart
        said = json.loads(named(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not a JSON file: {error}") from None
    if not isinstance(said, dict):
        raise ConfigError(f"{path} must hold options, as one object.")
    return said.items()


def _word(value: Any) -> str:
    if isinstance(value, (dict, list)):
        word = json.dumps(value, ensure_ascii=False)
    else:
        word = str(value).lower() if isinstance(value, bool) or value is None else str(value)
    return re.sub(r"\$(?!\{)", LITERAL, word)  # no shell expands it; in braces it is a variable
