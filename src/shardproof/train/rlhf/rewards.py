"""Reward functions: the built-in ones, and those of a user's file.

A reward function is called as TRL calls it: `completions` (texts, or lists with one turn) and one list for each other
column of the rows, and returns a number for each completion, or None where it has nothing to say.
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
NOT_HANDED_ON = {"prompt", "completion", "completion_ids", *TAKEN}  # columns that TRL keeps from rewards


def text_of(completion: Any) -> str:
    """What was generated, of a text or of a list of turns: where functions were called, what was said behind that."""
    if isinstance(completion, list):
        called = [number for number, turn in enumerate(completion, 1) if turn.get("role") == "tool"]
        return "".join(str(turn.get("content") or "") for turn in completion[max(called, default=0) :])
    return str(completion)


def accuracy(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 where the answer ends with the same number as the reference, 0 elsewhere; None for rows without one."""
    references = next((columns[name] for name in REFERENCES if name in columns), [None] * len(completions))
    rewards: list[float | None] = []
    for completion, reference in zip(completions, references, strict=True):
        right = None if reference is None else number_of(text_of(reference))
        rewards.append(None if right is None else float(number_of(text_of(completion)) == right))
    return rewards


def format_reward(pattern: str) -> Reward:
    """1 where the whole answer matches the regular expression, 0 elsewhere."""
    compiled = re.compile(pattern)

    def format(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [float(compiled.fullmatch(text_of(completion)) is not None) for completion in completions]

    return format


def length_reward(longest: int) -> Reward:
    """What is left of the longest answer that may be generated, as a share: 1 for nothing, 0 for an answer cut off."""

    def length(completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any) -> list[float | None]:
        return [1.0 - min(len(ids), longest) / longest for ids in completion_ids]

    return length


def unrewarded(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Of answers that only a teacher judges, by their tokens: TRL wants a reward."""
    return [0.0] * len(completions)


def check_rewards(names: Sequence[str], pattern: str, plugins: bool = False) -> None:
    """Raise ConfigError for a reward function that cannot be found, without running any code.

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
    """The functions of these names, each of which says what is wrong with what it returns (see `reward_calls.py`).

    `alone`: no reward model or environment judges besides.

    Raises:
        ConfigError: a file fails when it is run, or has something else under that name.
    """
    return Judges(_found(names, pattern, longest, plugins), alone).functions


def check_rewarded(config: RlhfConfig, batch: Batch, rows: Any, val_rows: Any = None) -> None:
    """Where answers are generated: raise DataError where rows are too few, ConfigError for rewards that want columns
    which rows do not have, or a reward model that is none."""
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
    """Raise ConfigError where rewards or environments want columns that these rows do not have."""
    columns: set[str] = set()
    for row in rows:
        columns.update(row.extra["columns"], FILE_COLUMNS.values() if has_files(row.messages) else ())
    given = columns | ({"environments"} if config.environments else set())  # which TRL hands on
    check_columns_for(config.reward_funcs, given, load(config.external_plugins))
    check_environments_for(config, columns)


def check_columns_for(names: Sequence[str], columns: Collection[str], plugins: Plugins | None = None) -> None:
    """Raise ConfigError for a reward function that cannot be loaded, or wants what no column of the rows has."""
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
    """Raise ConfigError for a name that is neither known nor one of a function in a file."""
    if not is_in_file(name):
        Plugins().find("reward", name)
