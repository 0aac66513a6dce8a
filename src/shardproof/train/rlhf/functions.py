"""Functions in a user's file that options name: FILE.py:FUNCTION."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardproof.errors import ConfigError
from shardproof.plugins import run_file


def is_in_file(name: str) -> bool:
    """Whether this names a function in a file."""
    file, _, function = name.rpartition(":")
    return bool(file) and function.isidentifier()


_KINDS: dict[str, tuple[type[Any], ...]] = {
    "function": (ast.FunctionDef, ast.AsyncFunctionDef),
    "class": (ast.ClassDef,),
}


def check_there(option: str, name: str, word: str = "function") -> None:
    """Raise ConfigError for a function or class that its file does not have, without running any code."""
    file, _, wanted = name.rpartition(":")
    try:
        tree = ast.parse(Path(file).expanduser().read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise ConfigError(f"{option} {name}: line {error.lineno} of {file}: {error.msg}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {name}: the file {file} cannot be read.") from error
    there = [node.name for node in tree.body if isinstance(node, _KINDS[word])]
    assigned = [t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)]
    imported = [a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names]
    constants = [
        (t.id, n.lineno)
        for n in tree.body
        if isinstance(n, ast.Assign) and isinstance(n.value, (ast.Constant, ast.List, ast.Dict, ast.Tuple, ast.Set))
        for t in n.targets
        if isinstance(t, ast.Name)
    ]
    if wanted in dict(constants) and wanted not in there:
        raise ConfigError(f"{option} {name}: {wanted!r} (line {dict(constants)[wanted]}) is not a {word}.")
    if wanted not in (*there, *assigned, *imported):
        raise ConfigError(f"{option} {name}: {file} has no {word} {wanted!r}. It has: {', '.join(there) or 'none'}.")


def function_of(option: str, name: str, word: str = "function") -> Callable[..., Any]:
    """The function or class of this name; its file is run once.

    Raises:
        ConfigError: the file fails when it is run, or has something else under that name.
    """
    file, _, function = name.rpartition(":")
    found = getattr(_module(str(Path(file).expanduser().absolute()), option), function, None)
    if not callable(found):
        raise ConfigError(f"{option} {name}: {function!r} in {file} is not a {word}.")
    return found


_RUN: dict[str, Any] = {}


def _module(path: str, option: str) -> Any:
    if path not in _RUN:
        _RUN[path] = run_file(path, option)
    return _RUN[path]
