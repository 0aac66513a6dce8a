"""Reward functions: the built-in ones, and those in a user's file.

A reward function is called as in TRL: with `completions` (texts, or lists with one turn) and a list for each other
column of the rows. It returns a number for each completion, or None for no reward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from shardproof.data.forms.parts import FILE_COLUMNS, has_files
from shardproof.errors import ConfigError, DataError
from shardproof.plugins import KINDS, Plugins, load
from shardproof.train.answers.numbers import number_of
from shardproof.train.model.reward_models import check_reward_model
from shardproof.train.options.config import Batch
from shardproof.train.options.patterns import check_pattern
from shardproof.train.options.rlhf_config import REWARDED, RlhfConfig
from shardproof.train.plugin_calls import place_of
from shardproof.train.rlhf import react
from shardproof.train.rlhf.environments import check_environments_for
from shardproof.train.rlhf.functions import check_there, function_of, is_in_file
from shardproof.train.rlhf.reward_calls import TAKEN, Judges, misfit

Reward = Callable[..., list[float | None]]

BUILT_IN = KINDS["reward"].built_in
REFERENCES = ("solution", "answer", "response", "completion", "output")  # columns that may hold the right answer
NOT_HANDED_ON = {"prompt", "completion", "completion_ids", *TAKEN}  # columns that TRL does not pass to rewards


def text_of(completion: Any) -> str:
    """The generated text of a completion, which is a text or a list of turns: after the last function call, if there is
    one."""
    if isinstance(completion, list):
        called = [number for number, turn in enumerate(completion, 1) if turn.get("role") == "tool"]
        return "".join(str(turn.get("content") or "") for turn in completion[max(called, default=0) :])
    return str(completion)


def accuracy(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 if the answer ends with the same number as the reference, otherwise 0; None for rows without one."""
    references = next((columns[name] for name in REFERENCES if name in columns), [None] * len(completions))
    rewards: list[float | None] = []
    for completion, reference in zip(completions, references, strict=True):
        right = None if reference is None else number_of(text_of(reference))
        rewards.append(None if right is None else float(number_of(text_of(completion)) == right))
    return rewards


def format_reward(pattern: str) -> Reward:
    """1 if the whole answer matches the regular expression, otherwise 0."""
    compiled = re.compile(pattern)

    def format(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [float(compiled.fullmatch(text_of(completion)) is not None) for completion in completions]

    return format


def length_reward(longest: int) -> Reward:
    """The unused share of the maximum length: 1 for an empty answer, 0 for a truncated one."""

    def length(completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any) -> list[float | None]:
        return [1.0 - min(len(ids), longest) / longest for ids in completion_ids]

    return length


def unrewarded(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """For answers whose tokens only a teacher judges: TRL requires a reward."""
    return [0.0] * len(completions)


def check_rewards(names: Sequence[str], pattern: str, plugins: bool = False) -> None:
    """Raise ConfigError for a reward function that does not exist, without running any code.

    `plugins`: other names may be those of plugins.
    """
    check_pattern("--format-pattern", pattern)
    for name in names:
        if name in BUILT_IN or (plugins and ":" not in name):
            continue
        _check_name(name)
        check_there("--reward-funcs", name)


def load_rewards(
    names: Sequence[str], pattern: str, longest: int, plugins: Plugins | None = None, alone: bool = True
) -> list[Reward]:
    """The functions with these names, with checked results (see `reward_calls.py`).

    `alone`: there is no reward model or environment.

    Raises:
        ConfigError: a file fails when it is run, or has something else under that name.
    """
    return Judges(_found(names, pattern, longest, plugins), alone).functions


def check_rewarded(config: RlhfConfig, batch: Batch, rows: Any, val_rows: Any = None) -> None:
    """If answers are generated, raise DataError for too few rows, and ConfigError for rewards that need columns which
    the rows do not have, or for an invalid reward model."""
    if config.rlhf_type not in REWARDED:
        return
    steps = config.steps_per_generation or batch.accumulation
    at_once = batch.micro * batch.readers * steps // config.generations
    if len(rows) < at_once:
        micro_batches = "--steps-per-generation" if config.steps_per_generation else "--gradient-accumulation-steps"
        raise DataError(
            f"Answers to {at_once} prompts are generated at once, and there are {len(rows)} row(s).\n"
            f"Lower --per-device-batch-size or {micro_batches}, or raise --num-generations."
        )
    check_columns_of(config, rows)
    if val_rows is not None:
        try:
            check_columns_of(config, val_rows)
        except ConfigError as error:
            raise ConfigError(f"Rows to evaluate on: {error}") from None
    for model in config.reward_model:
        check_reward_model(model, config.trust_remote_code)


def check_columns_of(config: RlhfConfig, rows: Any) -> None:
    """Raise ConfigError if rewards or environments need columns that these rows do not have."""
    columns: set[str] = set()
    for row in rows:
        columns.update(row.extra["columns"], FILE_COLUMNS.values() if has_files(row.messages) else ())
    given = columns | ({"environments"} if config.environments else set())  # which TRL passes on
    check_columns_for(config.reward_funcs, given, load(config.external_plugins))
    check_environments_for(config, columns)


def check_columns_for(names: Sequence[str], columns: Collection[str], plugins: Plugins | None = None) -> None:
    """Raise ConfigError for a reward function that cannot be loaded, or needs a column that the rows do not have."""
    given = {*columns} - NOT_HANDED_ON
    there = ", ".join(sorted(given)) or "none"
    for name, function in _found(names, "", 1, plugins):
        if problem := misfit(function, given | TAKEN):
            raise ConfigError(f"--reward-funcs {name}{place_of(function)} {problem}")
        if function is accuracy and not given & set(REFERENCES):
            raise ConfigError(
                f"--reward-funcs accuracy compares answers with the right one, in a column"
                f" {', '.join(REFERENCES[:-1])} or "
                f"{REFERENCES[-1]}. The rows have: {there}.\nName it with --columns answer=NAME."
            )


def _found(
    names: Sequence[str], pattern: str, longest: int, plugins: Plugins | None = None
) -> list[tuple[str, Reward]]:
    built_in = {"accuracy": accuracy, "format": format_reward(pattern), "length": length_reward(longest)}
    built_in |= react.rewards(text_of)
    registered = {name: plugins.find("reward", name) for name in plugins.names("reward")} if plugins else {}
    known = built_in | registered
    return [(name, known[name] if name in known else _from_file(name)) for name in names]


def _from_file(name: str) -> Reward:
    _check_name(name)
    return function_of("--reward-funcs", name)


def _check_name(name: str) -> None:
    """Raise ConfigError for a name that is neither known nor a function in a file."""
    if not is_in_file(name):
        Plugins().find("reward", name)
