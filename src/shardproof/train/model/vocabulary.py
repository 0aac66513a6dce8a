"""Tokens without a row in the embedding: the tokenizer has more tokens than the embedding has rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardproof.errors import ConfigError
from shardproof.train.model.loading import load_tokenizer, tokenizer_of
from shardproof.train.model.positions import place_of, without_weights
from shardproof.train.options.config import RunConfig
from shardproof.train.options.option import flag
from shardproof.train.options.rlhf_config import RlhfConfig

GIVEN_TOKENS = ("ref_model", "teacher_model", "value_model")  # a reward model reads text


def check_vocabulary(config: RunConfig, source: str, processing: Any, *encoded: Any) -> None:
    """Raise ConfigError if the model's embedding has no row for a token in rows encoded by a recipe (or None), or for
    the padding token; likewise if another model that is given these tokens has no row for one, or knows it under
    another number. Tokens that are only encoded during training are not checked."""
    tokenizer = tokenizer_of(processing)
    pad = getattr(tokenizer, "pad_token_id", None)
    found = [(pad, f"{config.model}: rows are padded with")] if pad is not None else []
    for rows in encoded:
        found += [(token, f"{where}: the row has") for token, where in _largest(config, rows)]
    token, where = max(found, default=(0, ""))
    if isinstance(config, RlhfConfig):
        _check_others(config, tokenizer, token, where)
    if getattr(config, "new_special_tokens", None) or config.adapters:  # the embedding has been resized, or will be
        return
    rows_there = _rows_of(source, token, config.trust_remote_code)
    if rows_there is None:
        return
    text = tokenizer.convert_ids_to_tokens(token)
    instead = f" Or extend it: --new-special-tokens {text!r}." if hasattr(config, "new_special_tokens") else ""
    raise ConfigError(
        f"{where} {text!r}, which is token {token}, but the embedding of {config.model} has {rows_there} rows.\n"
        f"Use the tokenizer that belongs to the model.{instead}"
    )


def _check_others(config: RlhfConfig, tokenizer: Any, token: int, where: str) -> None:
    """Raise ConfigError for a model that is given the trained model's tokens but has a different vocabulary."""
    for option in GIVEN_TOKENS:
        named = getattr(config, option)
        if named is None or named == config.model:
            continue
        name = f"{flag(option)} {named}"
        its = f"It gets its tokens from {config.model}: use a model with the same tokenizer."
        if (rows_there := _rows_of(named, token, config.trust_remote_code)) is not None:
            text = tokenizer.convert_ids_to_tokens(token)
            raise ConfigError(
                f"{where} {text!r}, which is token {token}, but the embedding of {name} has {rows_there} rows. {its}"
            )
        if (moved := _moved(config, tokenizer, named)) is not None:
            text, ours, theirs = moved
            raise ConfigError(f"{name} has {text!r} as token {theirs}, but {config.model} has it as {ours}. {its}")


def _moved(config: RlhfConfig, tokenizer: Any, named: str) -> tuple[str, int, int] | None:
    """The first text token with a different number in the tokenizer of another model, and both numbers. None if there
    is none, or it is unknown: a folder may hold weights only."""
    try:
        other = load_tokenizer(named, config)
    except ConfigError:
        return None
    here, there = tokenizer.get_vocab(), other.get_vocab()
    marks = {*tokenizer.get_added_vocab(), *other.get_added_vocab()}  # nothing reads the padding token
    moved = ((n, there[text], text) for text, n in here.items() if there.get(text, n) != n and text not in marks)
    first = min(moved, default=None)
    return None if first is None else (first[2], first[0], first[1])


def _largest(config: RunConfig, rows: Any) -> Iterator[tuple[int, str]]:
    """The token with the largest number, and where it is; nothing if rows are encoded later."""
    import pyarrow.compute as pc

    if isinstance(config, RlhfConfig):  # TRL encodes its rows itself: they hold no tokens
        if rows is not None and rows.report.largest_at:
            yield rows.report.largest_token, rows.report.largest_at
        return
    dataset = getattr(rows, "encoded", rows)
    if "input_ids" not in (getattr(dataset, "column_names", None) or ()):
        return
    before = 0
    for chunk in dataset.data.column("input_ids").chunks:
        tokens = pc.list_flatten(chunk)
        if len(tokens):
            most = pc.max(tokens)
            number = before + pc.list_parent_indices(chunk)[pc.index(tokens, most).as_py()].as_py()
            yield most.as_py(), place_of(config, rows, number)
        before += len(chunk)


def _rows_of(source: str, token: int, trust_remote_code: bool) -> int | None:
    """How many rows the model's embedding has, if there is none for this token; None if there is one, or it is
    unknown."""

    def declared(config: Any) -> bool:
        return token < (getattr(config.get_text_config(), "vocab_size", None) or 0)

    model = without_weights(source, declared, trust_remote_code)
    try:
        rows = model.get_input_embeddings().num_embeddings
    except (AttributeError, NotImplementedError):
        return None
    return rows if rows <= token else None
