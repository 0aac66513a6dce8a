"""`shardproof models`: the model families with a record."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from shardproof.cli.options import Parser, parse
from shardproof.errors import ConfigError
from shardproof.models.families.family import Family
from shardproof.models.families.known import FAMILIES

DESCRIPTION = """List the model families with a record, or show one record (by name or model_type). Any other
transformers model works too: an Auto class loads it, and its parts are found by their names."""


def parser() -> Parser:
    """The option table of the command."""
    made = Parser(
        prog="shardproof models",
        usage="shardproof models [NAME]",
        description=DESCRIPTION,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    made.add_argument("name", nargs="?", metavar="NAME", help="a family, such as qwen2_5_omni")
    return made


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    wanted = parse(parser(), argv).get("name")
    if wanted is None:
        print(f"{'family':16}{'model_type':18}{'rows may hold':26}parts")
        for family in FAMILIES:
            holds = ", ".join(("text", *family.media))
            print(f"{family.name:16}{', '.join(family.model_types):18}{holds:26}{', '.join(family.parts)}")
        return 0
    found = [f for f in FAMILIES if wanted.lower() in (f.name.lower(), *f.model_types)]
    if not found:
        names = ", ".join(family.name for family in FAMILIES)
        raise ConfigError(f"There is no record for {wanted!r}. There are: {names}.\nModels without a record work too.")
    _show(found[0])
    return 0


def _show(family: Family) -> None:
    lines = [
        ("family", family.name),
        ("model_type", ", ".join(family.model_types)),
        ("class", family.model_class + " (its own code: --trust-remote-code)" * family.own_code),
        ("processor", family.processor or "none: text only"),
        ("rows may hold", ", ".join(("text", *family.media))),
        *((part, ", ".join(paths)) for part, paths in family.parts.items()),
        ("layers", ", ".join(family.blocks)),
        ("used by some", ", ".join(family.dynamic) or "none: every row uses every module"),
        ("never trained", ", ".join(family.unused) or "none"),
    ]
    if family.speech:
        lines.append(("audio output", ", ".join(family.speech)))
    for name, text in lines:
        print(f"{name:16}{text}")
