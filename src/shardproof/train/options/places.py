"""What options name on this machine: models, adapters, files, and functions in files. One has many spellings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardproof.data.encoding.weights import BUILT_IN

# Values that are none of these, whatever lies here under such a name.
WORDS = ("", "tiny", "stdlib", "same", *BUILT_IN)
FOLDERS = ("model", "ref_model", "teacher_model", "reward_model", "value_model", "adapters", "ref_adapters")
FUNCTIONS = ("reward_funcs", "tools", "environments")  # others of these are built in, or a plugin's


def from_anywhere(option: str, value: Any) -> Any:
    """The value of an option, of what is on this machine with the whole path."""
    if isinstance(value, list):
        return [from_anywhere(option, one) for one in value]
    path, mark, rest = ("", "", "") if value is None else value.partition("#")
    if path in WORDS:
        return value
    if option in FUNCTIONS or not Path(path).exists():
        path, mark, rest = value.rpartition(":")
    return f"{Path(path).absolute()}{mark}{rest}" if path and Path(path).exists() else value


def with_real_places(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a run to be compared with those of another: folders and files of functions by their real paths."""
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
