"""What sees what in a run's model: its attention, and the handling of packed rows and rows shared by processes."""

from __future__ import annotations

from typing import Any

from shardproof.errors import ConfigError


def choose_attention(model: Any, config: Any) -> None:
    """Check the attention that a run or a plan asks for. If it asks for none, choose one that does not compute all
    pairs of tokens in a packed row, and one that processes can share."""
    from shardproof.models.attention.masks import tell_masks_of_positions
    from shardproof.models.attention.sinks import has_sinks
    from shardproof.models.attention.varlen import check_attention_of, knows_ours, take, take_for_packed

    if _shares_rows(config):
        tell_masks_of_positions(model)
    check_attention_of(model, config.attn)
    if config.attn is None and _shares_rows(config) and not getattr(config, "compile", False):
        take_for_packed(model, half=config.precision != "fp32")
    if config.attn is None and config.sequence_parallel > 1 and has_sinks(model) and knows_ours(model):
        take(model)  # the model's own attention cannot be split


def share_rows(model: Any, config: Any) -> None:
    """Prepare a model for packed rows, for batches without padding, or for rows split over processes.

    Raises:
        ConfigError: the model does not support it.
    """
    from shardproof.models.attention.padding_free import make_padding_free
    from shardproof.models.attention.recurrent import carries_state, isolate_documents
    from shardproof.train.model.shared_rows import share_rows_of

    if _shares_rows(config) and carries_state(model):
        if config.compile:
            raise ConfigError(
                f"--packing with --compile: layers of {type(model).__name__} carry state from token to token, and"
                f" the shapes of their documents change with each batch. Leave one of the two out."
            )
        isolate_documents(model)
    if getattr(config, "padding_free", False):
        make_padding_free(model)
    if config.sequence_parallel > 1:
        check_parts_of_rows(model)
        share_rows_of(model, config.sequence_parallel, gathers=config.recipe != "sft")


def check_parts_of_rows(model: Any) -> None:
    """Raise ConfigError for a model, before adapters, whose decoder carries state besides attention (judged by the
    names of its layers) or counts positions itself; any other model is tested at the first step."""
    from shardproof.models.attention.recurrent import looks_back
    from shardproof.train.model.positions import counts_positions

    decoder, name = model.get_decoder(), type(model).__name__
    why = ""
    if looks_back(decoder):
        why = f"layers of {name} carry a state from token to token"
    elif counts_positions(decoder):
        why = f"{name} counts the positions of a row's tokens itself, by the row's mask or its padding"
    if why:
        raise ConfigError(
            f"--sequence-parallel: {why}, and each process has only a part of each row. Leave --sequence-parallel out."
        )


def _shares_rows(config: Any) -> bool:
    return getattr(config, "packing", False) or getattr(config, "padding_free", False)
