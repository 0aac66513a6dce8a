"""The rows of a run, encoded once and kept in a folder, for the `--cached-dataset` option of later runs."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardproof.data.cached import remove, write
from shardproof.data.encoding.dated import day_of
from shardproof.errors import ConfigError
from shardproof.train import run
from shardproof.train.folder import BASE
from shardproof.train.model.changes import tokens_of
from shardproof.train.model.loading import tokenizer_of
from shardproof.train.options.config import RunConfig
from shardproof.train.rlhf.pictures import are_pictured
from shardproof.train.rows.cached import to_be_kept

TRAIN, VAL = "train", "val"  # folders of training and validation rows


@dataclass(frozen=True)
class Kept:
    """Encoded rows: where they are, and what happened to them."""

    folder: Path
    report: Any
    skipped: int


def encode(config: RunConfig, folder: Path) -> list[Kept]:
    """Write the training rows to `train` in a folder, and validation rows, if there are any, to `val`. Rows that were
    encoded there before are removed.

    Raises:
        ConfigError, DataError: errors that the run would report before training, or the folder cannot be written.
    """
    recipe: Any = run.recipe_of(config)
    rows, val_rows = recipe.read(config)
    config = config.model_copy(update={"packing": False} if hasattr(config, "packing") else {})
    if names := getattr(config, "new_special_tokens", []):
        config = config.model_copy(update={"new_special_tokens": tokens_of(names)})
    found: list[tuple[str, Any, Any]] = []
    with tempfile.TemporaryDirectory(prefix="shardproof-") as scratch:
        processing = run.processing_of(run.model_source(config, Path(scratch) / BASE, rows), config)
        day = day_of(tokenizer_of(processing))
        for name, those in ((TRAIN, rows), (VAL, val_rows)):
            if those is None:
                continue
            with to_be_kept():
                encoded = recipe.encode(config, those, processing)
            encoded = getattr(encoded, "encoded", encoded)  # for rows with files, which are read again in training
            if are_pictured(encoded):
                raise ConfigError(
                    "Rows with files cannot be encoded in advance for rlhf: it reads the files during training anyway."
                )
            found.append((name, those, encoded))
    remove(folder / VAL)  # old validation rows may now be training rows
    for name, those, encoded in found:
        write(folder / name, those, encoded, encoded.said, day)
    return [Kept(folder / name, encoded.report, len(those.skipped)) for name, those, encoded in found]
