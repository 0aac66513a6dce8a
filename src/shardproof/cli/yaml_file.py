"""A YAML file of options, each with its line.

Read as YAML 1.2 where the versions differ in practice: 1e-4 is a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from shardproof.errors import ConfigError


class Loader(yaml.SafeLoader):
    """A loader that reads 1e-4 as a number; PyYAML takes it for text, since it has no point."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def named(path: str) -> Path:
    """The file of options with this name.

    Raises:
        ConfigError: there is none.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        what = f"{path} is a folder" if file.is_dir() else f"There is no file {path}"
        raise ConfigError(f"{what}. An argument without an option, or after --config, is a file of options.")
    return file


def entries(path: str) -> Iterator[tuple[int, str, str, Any]]:
    """Line, name, value as written, and parsed value of every option in the file.

    Raises:
        ConfigError: there is no such file, it is not YAML, or holds no options.
    """
    file = named(path)
    try:
        text = file.read_text(encoding="utf-8")
        loader = Loader(text)
        root = loader.get_single_node()
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            found = "a list" if isinstance(root, yaml.SequenceNode) else "one value"
            raise ConfigError(f"{path} must hold options, one 'name: value' per line; it holds {found}.")
        for key, node in root.value:
            raw = text[node.start_mark.index : node.end_mark.index].strip().splitlines()
            shown = raw[0] + " ..." * (len(raw) > 1) if raw else ""
            yield key.start_mark.line + 1, str(key.value), shown, loader.construct_object(node, deep=True)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} is not a YAML file: {' '.join(str(error).split())}") from error
