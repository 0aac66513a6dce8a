"""A pydantic model as command-line options.

argparse rather than typer or tyro: with pydantic it answers `--help` in 0.12 s where typer takes 0.25 s
and tyro 0.35 s, it takes `--dataset A B C` as it stands, and the one model serves YAML files too.
"""

from __future__ import annotations

import argparse
import difflib
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from shardproof.errors import ConfigError

Config = TypeVar("Config", bound=BaseModel)


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are ours: one message, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}\n'{self.prog} --help' lists the options.")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def hyphenated(argv: Sequence[str]) -> list[str]:
    """`--max_length=5` is `--max-length=5`; values are left alone."""
    return [
        arg.split("=", 1)[0].replace("_", "-") + arg[len(arg.split("=", 1)[0]) :] if arg.startswith("--") else arg
        for arg in argv
    ]


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that `name` may have meant, or nothing."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {found[0]}?" if found else ""


def parser_for(model: type[BaseModel], prog: str, usage: str, description: str) -> Parser:
    """A parser with an option for each field of `model`, under the groups its fields name."""
    parser = Parser(
        prog=prog, usage=usage, description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    sections: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        group = str(extra.get("group", "Options"))
        if group not in sections:
            sections[group] = parser.add_argument_group(group)
        sections[group].add_argument(flag(name), dest=name, **_argument(name, field))
    return parser


def _argument(name: str, field: FieldInfo) -> dict[str, Any]:
    kind = _plain(field.annotation)
    text = (field.description or "").replace("%", "%%")
    if field.default is not None and field.default != [] and kind is not bool:
        text += f" (default: {_shown(field.default)})"
    if kind is bool:
        return {"nargs": "?", "const": "true", "metavar": "yes|no", "help": text}
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else None
    if choices:
        return {"metavar": "|".join(choices), "help": text}
    if typing.get_origin(kind) is list:
        return {"nargs": "+", "metavar": "X", "help": text}
    return {"metavar": {int: "N", float: "X"}.get(kind, "TEXT"), "help": text}


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _plain(annotation: Any) -> Any:
    """The type without `| None` and without annotations."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return _plain(next(a for a in typing.get_args(annotation) if a is not type(None)))
    if typing.get_origin(annotation) is typing.Annotated:
        return _plain(typing.get_args(annotation)[0])
    return annotation


def parse(parser: Parser, argv: Sequence[str]) -> dict[str, Any]:
    """What the command line gave, as strings.

    Raises:
        ConfigError: an option that does not exist, with the nearest that does.
    """
    known = [o for action in parser._actions for o in action.option_strings]
    found, rest = parser.parse_known_args(hyphenated(argv))
    for arg in rest:
        if arg.startswith("-"):
            name = arg.split("=", 1)[0]
            raise ConfigError(f"There is no option {name}.{nearest(name, known)}\n'{parser.prog} --help' lists them.")
    if rest:
        raise ConfigError(f"Unexpected argument {rest[0]!r}.\n'{parser.prog} --help' lists the options.")
    return vars(found)


def read_yaml(path: str, model: type[BaseModel]) -> dict[str, Any]:
    """The options that stand in a YAML file, hyphen or underscore.

    Raises:
        ConfigError: the file is missing, is not YAML, or names an unknown option.
    """
    import yaml

    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"There is no file {path}.")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a YAML file: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold options, one 'name: value' a line; it holds a {type(content).__name__}.")
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    for key in values:
        if key not in model.model_fields:
            hint = nearest(key, model.model_fields)
            raise ConfigError(f"{path}: there is no option {key!r}.{hint}")
    return values


def build(model: type[Config], values: dict[str, Any]) -> Config:
    """The model from values of the file and the command line.

    Raises:
        ConfigError: a value has the wrong type or lies outside its limits; the text names the option.
    """
    for name, value in values.items():
        annotation = model.model_fields[name].annotation
        if not isinstance(value, str):
            continue
        if typing.get_origin(_plain(annotation)) is list:
            values[name] = [value]
        elif value.lower() == "none" and type(None) in typing.get_args(annotation):
            values[name] = None
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        given = first.get("input")
        raise ConfigError(f"{flag(name)} {given}: {_sentence(first['msg'])}") from None


def _sentence(text: str) -> str:
    text = text.removeprefix("Value error, ").removeprefix("Input ")
    return text[0].lower() + text[1:] + ("" if text.endswith(".") else ".")
