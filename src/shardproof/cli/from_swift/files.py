"""Files of options of ms-swift's, YAML or JSON, which stand first in a command of its, or behind --config."""

from __future__ import annotations

import json
from typing import Any

from shardproof.cli.yaml_file import entries

ENDS = (".yaml", ".yml", ".json")
VARIABLES = "ENV"  # what of a file is set as variables


def read(path: str) -> tuple[list[tuple[str, list[str]]], dict[str, str]]:
    """The options of a file, as a command line would give them, and its variables.

    Raises:
        ConfigError: there is no such file, or it holds no options.
    """
    options, variables = [], dict[str, str]()
    for _, name, _, value in entries(path):
        if name == VARIABLES:
            variables = {variable: str(said) for variable, said in (value or {}).items()}
        else:
            options.append(
                (name.replace("-", "_"), [_word(one) for one in (value if isinstance(value, list) else [value])])
            )
    return options, variables


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
