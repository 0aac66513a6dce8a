"""Options that name things on this machine: models, adapters, files, and functions in files. One path can be spelled in
many ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardproof.data.encoding.weights import BUILT_IN

# Values that are never paths, even if a file or folder of that name exists.
WORDS = ("", "tiny", "stdlib", "same", *BUILT_IN)
FOLDERS = ("model", "ref_model", "teacher_model", "reward_model", "value_model", "adapters", "ref_adapters")
FUNCTIONS = ("reward_funcs", "tools", "environments")  # values without a file are built in or come from a plugin


def from_anywhere(option: str, value: Any) -> Any:
    """The value of an option, with an absolute path if it exists on this machine."""
    if isinstance(value, list):
        return [from_anywhere(option, one) for one in value]
    path, mark, rest = ("", "", "") if value is None else value.partition("#")
    if path in WORDS:
        return value
    if option in FUNCTIONS or not Path(path).exists():
        path, mark, rest = value.rpartition(":")
    return f"{Path(path).absolute()}{mark}{rest}" if path and Path(path).exists() else value


def with_real_places(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a run, for comparison with those of another: folders, and files with functions, as real paths."""
    return options | {name: _real(name, options[name]) for name in (*FOLDERS, *FUNCTIONS) if name in options}


def _real(option: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_real(option, one) for one in value]
    if value is None or value in WORDS:
        return value
    file, mark, function = value.rpartition(":") if option in FUNCTIONS else (value, "", "")
    path = Path(file).expanduser()
    there = path.is_file() if option in FUNCTIONS else path.is_dir()
    return f"{path.resolve()}{mark}{function}" if there else value
