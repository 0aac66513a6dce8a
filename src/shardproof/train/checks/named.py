"""Checks of what a run names: its model and rows, also those of the run that it continues, and plugins."""

from __future__ import annotations

import shlex

from shardproof.errors import ConfigError
from shardproof.plugins import check_names, load
from shardproof.train.folder import options_of_resumed
from shardproof.train.model.loading import check_model_source
from shardproof.train.options.config import RunConfig
from shardproof.train.resume import AUTO, same_folder

NAMED = {
    "model": "a folder, or a model on the hub (OWNER/NAME); 'tiny' builds a small one for trying things out",
    "dataset": "a file of rows (.jsonl, .json, .csv, .tsv, .parquet), or a dataset on the hub (OWNER/NAME); 'stdlib' is"
    " text for trying things out",
}


def check_named(config: RunConfig) -> None:
    """Raise ConfigError unless a model and rows are named. Neither has a default: nobody wants to train on something
    they did not choose."""
    there = config.model_fields_set | ({"dataset"} if config.cached_dataset else set())
    missing = {name: f"\n--{name}: {what}." for name, what in NAMED.items() if name not in there}
    if not missing:
        return
    verb, what = "is" if len(missing) == 1 else "are", "".join(missing.values())
    given = [f"--{name}" for name in NAMED if name not in missing]
    if given and (command := with_its_options(config, given[0], getattr(config, given[0][2:]))):
        what += f"\nOr take all other options from the run that is resumed: {command}"
    raise ConfigError(f"{' and '.join(f'--{name}' for name in missing)} {verb} missing.{what}")


def check_model(config: RunConfig) -> None:
    """Raise ConfigError for a --model that does not exist. The model of a resumed run may have moved."""
    try:
        check_model_source(config.model)
    except ConfigError as error:
        if command := with_its_options(config, "--model", "FOLDER"):
            raise ConfigError(f"{error}\nIf it has moved, name its new folder: {command}") from None
        raise


def with_its_options(config: RunConfig, option: str, value: str | list[str]) -> str:
    """The command that resumes a run with its own options except for `option`, or an empty string if no run is
    resumed."""
    file = options_of_resumed(config.resume, config.output_dir) if config.resume else None
    if file is None:
        return ""
    words = ["shardproof", config.command, str(file), "--resume", str(config.resume)]
    words += [option, *([value] if isinstance(value, str) else value)]
    if config.output_dir and (config.resume == AUTO or not same_folder(file.parent, config.output_dir)):
        words += ["--output-dir", config.output_dir]
    return shlex.join(words)


def check_plugins(config: RunConfig) -> None:
    """Run --external-plugins, and raise ConfigError for a name that is neither theirs nor built in, or for an argument
    that the optimizer does not take."""
    check_names(config, load(config.external_plugins))
    if config.optimizer_arguments:
        from shardproof.train.optim.optimizers import check_arguments

        check_arguments(config)
