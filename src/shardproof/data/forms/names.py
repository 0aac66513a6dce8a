"""Placeholders for names in rows: `{{NAME}}` and `{{AUTHOR}}` in ms-swift's self-cognition datasets, which teach a
model its name and who made it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardproof.data.forms.formats import Form, Normal
from shardproof.errors import ConfigError

NAME, AUTHOR = "{{NAME}}", "{{AUTHOR}}"
OPEN = "self-cognition"  # part of the names of datasets whose rows have these placeholders
CHINESE = "zh"  # the value of the field `tag` of a row in Chinese


@dataclass(frozen=True)
class Named:
    """`normalise` of a form, after filling in the names in every text of a record."""

    form: Form
    names: Mapping[str, Sequence[str]]

    def __call__(self, record: Any, columns: Mapping[str, str] | None = None) -> Normal:
        chinese = isinstance(record, dict) and record.get("tag") == CHINESE
        return self.form.normalise(
            _filled(record, {left_open: given[0 if chinese else -1] for left_open, given in self.names.items()}),
            columns,
        )


def _filled(value: Any, said: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for left_open, name in said.items():
            value = value.replace(left_open, name)
        return value
    if isinstance(value, dict):
        return {key: _filled(its, said) for key, its in value.items()}
    return [_filled(its, said) for its in value] if isinstance(value, list) else value


def check_left_open(name: Sequence[str], author: Sequence[str], datasets: Sequence[str], *read: Any) -> None:
    """Raise ConfigError for names that no row has a placeholder for: a placeholder in another spelling would be learned
    as is.

    `read`: rows, or None; rows read while training cannot be checked.
    """
    given = [flag for flag, its in (("--model-name", name), ("--model-author", author)) if its]
    rows = [part for part in read if part is not None]
    if not given or any(OPEN in source for source in datasets) or not all(hasattr(part, "records") for part in rows):
        return
    texts = (json.dumps(record, default=repr) for part in rows for record in part.records())
    if not any(NAME in text or AUTHOR in text for text in texts):
        out = "it" if len(given) == 1 else "them"
        raise ConfigError(
            f"{' and '.join(given)}: no row of {', '.join(datasets)} has a placeholder for the model's name ({NAME}) "
            f"or author ({AUTHOR}). Leave {out} out, or write these placeholders where the names belong."
        )


def named(form: Form, datasets: Sequence[str], name: Sequence[str], author: Sequence[str]) -> Form:
    """The form of records whose placeholders for the model's name and author are filled in.

    Args:
        form: the form of the filled-in records.
        datasets: the datasets that are read in this form.
        name, author: none, one, or two values: in Chinese, for rows whose field `tag` is `zh`, and for all others.

    Raises:
        ConfigError: there are more than two names, or a dataset has placeholders whose names are not given.
    """
    for flag, given in (("--model-name", name), ("--model-author", author)):
        if len(given) > 2:
            raise ConfigError(f"{flag} {' '.join(given)}: give one name, or a Chinese and an English one.")
    left = [source for source in datasets if OPEN in source]
    if left and not (name and author):
        raise ConfigError(
            f"Rows of {left[0]} have placeholders for the model's name ({NAME}) and author ({AUTHOR}): give "
            "--model-name and --model-author, each in Chinese and in English if there are rows in both."
        )
    said = {left_open: tuple(given) for left_open, given in ((NAME, name), (AUTHOR, author)) if given}
    return replace(form, normalise=Named(form, said)) if said else form
