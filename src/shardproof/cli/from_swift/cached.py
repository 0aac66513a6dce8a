"""`swift export --to_cached_dataset true`: which rows are encoded, and for which command."""

from __future__ import annotations

from dataclasses import replace

from shardproof.cli.data_encode import GROUPS
from shardproof.cli.from_swift.shell import Line
from shardproof.errors import ConfigError
from shardproof.train.options.config import RunConfig

TO, MODE = "to_cached_dataset", "template_mode"
# Pairs are encoded the same for all algorithms that take them.
MODES = {"train": ("sft", ""), "rlhf": ("rlhf", "dpo"), "kto": ("rlhf", "kto")}


def encodes(line: Line) -> bool:
    """Whether an export writes rows rather than a model."""
    on = [given[:1] for name, given in line.options if name == TO]
    return line.command == "export" and on in ([[]], [["true"]], [["True"]])


def for_recipe(line: Line) -> tuple[str, Line]:
    """The command that the rows are for, and the options of the command that encodes them.

    Raises:
        ConfigError: rows of an unknown kind are asked for.
    """
    mode = next((" ".join(given) for name, given in line.options if name == MODE), "train")
    if mode not in MODES:
        raise ConfigError(f"--template_mode {mode}: rows can be encoded for {', '.join(MODES)}.")
    recipe, kind = MODES[mode]
    options = [(name, given) for name, given in line.options if name not in (TO, MODE)]
    return recipe, replace(line, command=recipe, options=[*options, *([("rlhf_type", [kind])] if kind else [])])


def about_rows(config: type[RunConfig], name: str) -> bool:
    """Whether an option affects how rows are encoded, or where they are written."""
    said = config.model_fields[name].json_schema_extra
    group = said.get("group") if isinstance(said, dict) else None
    return name in ("output_dir", "overwrite", "seed") or group in GROUPS
