"""Learned positions (GPT-2, OPT, BERT): a table with one row per position, and none beyond its end.

Rotary and sinusoidal positions are computed, so models that use them are never refused.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from shardproof.data.rows import Places
from shardproof.errors import ConfigError
from shardproof.train.options.config import RunConfig
from shardproof.train.options.rlhf_config import RlhfConfig, writes_all_answers

_TABLE = re.compile(r"(^|\.)(wpe|\w*pos(ition)?s?(_\w+)?)$")
_SPARE = 8  # most rows such a table may have beyond the positions in the config


def learnt_positions(model: Any) -> int | None:
    """How many positions a model has learned; None if they are computed, or there are none."""
    known = _declared(model.config)
    if known is None:
        return None
    from torch import nn

    found = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or not _TABLE.search(name) or "Sinusoid" in type(module).__name__:
            continue
        if known <= module.num_embeddings <= known + _SPARE:  # other tables are for images or token types
            offset = getattr(module, "offset", None)  # OPT's and BART's
            if offset is None:
                offset = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa's
            found.append(module.num_embeddings - offset)
    return min(found, default=None)


def counts_positions(model: Any) -> bool:
    """Whether a model counts positions itself, skipping padding: OPT by the mask, RoBERTa by the ids."""
    from torch import nn

    return any(
        hasattr(module, "create_position_ids_from_input_ids")
        or (isinstance(module, nn.Embedding) and "attention_mask" in inspect.signature(module.forward).parameters)
        for module in model.modules()
    )


def rotary_positions(config: Any) -> int | None:
    """How many positions a model with rotary embeddings is made for, from its config; None if it does not say, or uses
    others."""
    text = config.get_text_config()
    known = getattr(text, "max_position_embeddings", None) if getattr(text, "rope_parameters", None) else None
    return known if isinstance(known, int) else None


def _declared(config: Any) -> int | None:
    """The number of positions in a config; None if it has none, or they are rotary."""
    text = config.get_text_config()
    if getattr(text, "rope_parameters", None):
        return None
    known = getattr(text, "n_positions", None) or getattr(text, "max_position_embeddings", None)
    return known if isinstance(known, int) else None


def positions_for(source: str, tokens: int, trust_remote_code: bool = False) -> int | None:
    """How many positions the model in `source` has learned, if fewer than `tokens`; None if there are enough."""

    def enough(config: Any) -> bool:
        known = _declared(config)
        return known is None or tokens + _SPARE <= known

    model = without_weights(source, enough, trust_remote_code)
    limit = learnt_positions(model) if model is not None else None
    return limit if limit is not None and limit < tokens else None


def without_weights(source: str, enough: Callable[[Any], bool], trust_remote_code: bool) -> Any:
    """The model in `source` on the meta device; None if its config is `enough` to tell, or it cannot be built: it is a
    plugin's, or has an error that is reported when it is loaded."""
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        if enough(config):
            return None
        with torch.device("meta"):
            return transformers.AutoModel.from_config(config, trust_remote_code=trust_remote_code)
    except Exception:
        return None


def check_positions(config: RunConfig, source: str, *encoded: Any) -> None:
    """Raise ConfigError for rows encoded by a recipe (or None) that are longer than the model has positions."""
    for rows in encoded:
        if rows is None:
            continue
        tokens, where = _longest(config, rows)
        limit = positions_for(source, tokens, config.trust_remote_code)
        if limit is not None:
            raise ConfigError(_told(config, tokens, where, limit))


def _told(config: RunConfig, tokens: int, where: str, limit: int) -> str:
    has = f"{config.model} has learned only {limit} positions"
    answer = _generated(config)
    if answer and limit - answer >= 2:
        return (
            f"{where}: the prompt and --max-completion-length {answer} take up to {tokens} tokens, but {has}.\n"
            f"Lower --max-completion-length, or give --max-length {limit - answer}, which then limits prompts."
        )
    if answer:
        return f"--max-completion-length {answer}: {has}. Lower it to leave room for a prompt."
    how = f"--truncation {config.truncation} decides what happens to longer rows"
    row = f"{where}: the row has {tokens} tokens" if where else f"--max-length {tokens}: rows may be that long"
    return f"{row}, but {has}.\nGive --max-length {limit}: {how}."


def _generated(config: RunConfig) -> int:
    """How many tokens may be generated after a prompt."""
    return config.max_completion_length if isinstance(config, RlhfConfig) and writes_all_answers(config) else 0


def _longest(config: RunConfig, rows: Any) -> tuple[int, str]:
    """The length in tokens of the longest training row, and where it is; the place is empty if rows are read later."""
    import pyarrow.compute as pc

    if isinstance(config, RlhfConfig):
        return min(rows.report.longest_kept, config.max_length) + _generated(config), rows.report.longest_at
    encoded = rows
    rows = getattr(rows, "encoded", rows)  # rows with files are read again during training
    if not hasattr(rows, "column_names"):
        return config.max_length, ""
    name = next((name for name in ("lengths", "seq_lengths") if name in rows.column_names), None)
    if name is None:
        lengths, of_row = pc.list_value_length(rows.data.column("input_ids")), None
    else:  # several texts per row, or a packed row
        column = rows.data.column(name).combine_chunks()
        lengths, of_row = pc.list_flatten(column), pc.list_parent_indices(column)
    most = pc.max(lengths).as_py()
    number = pc.index(lengths, most).as_py()
    number = number if of_row is None else of_row[number].as_py()
    return most, place_of(config, encoded, number)


def place_of(config: RunConfig, encoded: Any, number: int) -> str:
    """Where the row with this number is; the datasets if that is not known, as for packed rows."""
    places = getattr(encoded, "places", None)
    return places[number] if isinstance(places, Places) else " ".join(config.dataset)
