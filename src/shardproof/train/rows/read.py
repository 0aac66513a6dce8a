"""The rows of a run, read and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardproof.data.forms.converted import converted
from shardproof.data.forms.formats import SUPERVISED, Form
from shardproof.data.forms.names import check_left_open, named
from shardproof.data.rows import Rows, check_columns
from shardproof.data.sources.mixture import Mixture
from shardproof.plugins import load
from shardproof.train.options.config import RunConfig
from shardproof.train.rows.cached import with_cached


def read(
    config: RunConfig, reader: Callable[..., Any], form: Form = SUPERVISED, trained: Callable[..., Any] | None = None
) -> tuple[Any, Any]:
    """The rows to train on and those to evaluate on (or None), checked; imports nothing heavy. Arguments as of `_read`.

    Raises:
        DataError: a file is missing, or a row is bad. ConfigError: an option names something that no row has.
    """
    found = _read(config, reader, form, trained)
    check_left_open(config.model_name, config.model_author, [*config.dataset, *config.val_dataset], *found)
    return found


def _read(config: RunConfig, reader: Any, form: Form, trained: Any) -> tuple[Any, Any]:
    """`form` is the form of rows once placeholders for names are filled in and --row-format has converted them;
    `trained` reads the training rows if they need another reader."""
    if config.row_format:
        form = converted(form, config.row_format, load(config.external_plugins).find("row format", config.row_format))
    form = named(form, [*config.dataset, *config.val_dataset], config.model_name, config.model_author)
    how: Any = {"form": form, "bad_rows": config.bad_rows, "seed": config.seed, "columns": config.columns}
    mixture = Mixture(tuple(config.interleave_prob), config.stopping_strategy) if config.interleave_prob else None
    if trained is not None:
        rows = trained(config.dataset, mixture=mixture, **how)
    elif config.dataset:
        rows = reader(config.dataset, mixture=mixture, others=bool(config.val_dataset), **how)
    else:
        rows = Rows([], [])
    rows = with_cached(config, rows, config.cached_dataset)
    if config.val_dataset or config.cached_val_dataset:
        val_rows = reader(config.val_dataset, others=True, **how) if config.val_dataset else Rows([], [])
        val_rows = with_cached(config, val_rows, config.cached_val_dataset)
        if trained is None and (config.dataset or config.val_dataset):
            check_columns([*config.dataset, *config.val_dataset], config.columns, [*rows.fields, *val_rows.fields])
        return rows, val_rows
    return rows.split(config.val_split, config.seed) if config.val_split else (rows, None)
