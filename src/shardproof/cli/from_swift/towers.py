"""Whether parts of a model were named by ms-swift's options, which have no effect there for models without them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardproof.train.model.lacking import OF_SWIFT


def of_towers(argv: Sequence[str], file: str | None) -> set[str]:
    """ms-swift's options about parts that are given on a command line or in its file of options."""
    from shardproof.cli.yaml_file import entries

    given = [word.partition("=")[0].removeprefix("--") for word in argv if word.startswith("--")]
    if file and Path(file).expanduser().is_file():
        given += [key for _, key, _, _ in entries(file)]
    theirs = {name for names in OF_SWIFT.values() for name in names}
    return theirs & {name.replace("-", "_") for name in given}
