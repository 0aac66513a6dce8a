"""Losses and ways to them that do not go together; what each of these functions raises is a ConfigError."""

from __future__ import annotations

from collections.abc import Mapping

from shardproof.data.encoding.weights import weights_named
from shardproof.errors import ConfigError
from shardproof.models.families.family import TALKER
from shardproof.plugins import KINDS
from shardproof.train.options.config import SftConfig


def check_spoken_loss(config: SftConfig) -> None:
    """The loss of codes of speech is added to that of words in the model's own forward."""
    if TALKER not in (config.train_parts or ()):
        return
    if config.loss == "all":
        raise ConfigError(
            f"--loss all and --train-parts {TALKER}: a {TALKER} speaks the last answer, which starts after the"
            f" tokens that are not learnt. Leave one of them out."
        )
    others = {
        "--chunked-loss": config.chunked_loss,
        "--loss-type dft": config.loss_type == "dft",
        f"--loss {config.loss}": config.loss not in KINDS["loss"].built_in,
    }
    if other := next((name for name, given in others.items() if given), None):
        raise ConfigError(
            f"{other} computes the loss of text, but --train-parts {TALKER} also learns speech codes. Leave one of"
            " them out."
        )


def check_smoothing(config: SftConfig) -> None:
    """Labels are smoothed in the causal loss of whole rows, which we compute."""
    if not config.label_smoothing_factor:
        return
    against = {
        "--loss-type dft": config.loss_type == "dft",
        f"--loss {config.loss}": config.loss not in KINDS["loss"].built_in,
        "--liger-kernel": config.liger_kernel,
        "--sequence-parallel": config.sequence_parallel > 1,
        f"--train-parts {TALKER}": TALKER in (config.train_parts or ()),
    }
    _refuse("--label-smoothing-factor", against, "that loss has no smoothing")


def weighs(config: SftConfig) -> dict[str, object]:
    """What does not go together with tokens that weigh more than others, and whether it is given."""
    return {
        f"--loss {config.loss}": config.loss not in KINDS["loss"].built_in,
        f"--train-parts {TALKER}": TALKER in (config.train_parts or ()),
    }


def check_weights(config: SftConfig) -> None:
    """Tokens are weighed in the causal loss, which we compute."""
    if config.token_weights:
        _refuse("--token-weights", weighs(config), "that loss weighs all tokens alike")
        weights_named(config.token_weights)


def check_balance(config: SftConfig) -> None:
    """Experts are balanced by what routers give in the model's own forward, of whole rows."""
    if not config.router_aux_loss_coef:
        return
    against = {
        "--chunked-loss": config.chunked_loss,
        "--liger-kernel": config.liger_kernel,
        "--sequence-parallel": config.sequence_parallel > 1,
        f"--train-parts {TALKER}": TALKER in (config.train_parts or ()),
    }
    _refuse("--router-aux-loss-coef", against, "that loss has no term that balances experts")
    if config.checkpointing_reentrant:
        raise ConfigError(
            "--router-aux-loss-coef and --checkpointing-reentrant: router outputs have no gradient inside reentrant"
            " checkpoints. "
            "Leave --checkpointing-reentrant out."
        )


def check_laid_out_files(config: SftConfig) -> None:
    """Of packed rows with files, and of parts of rows, the loss is computed from the hidden states that the head would
    take."""
    against = {
        f"--loss {config.loss}": config.loss not in KINDS["loss"].built_in,
        "--metrics": config.metrics,
        "--liger-kernel": config.liger_kernel,
        "--router-aux-loss-coef": config.router_aux_loss_coef,
        f"--train-parts {TALKER}": TALKER in (config.train_parts or ()),
    }
    if config.packing:
        _refuse("--packing", against, "of packed rows with files there are no logits, only the loss of words")
    if config.sequence_parallel > 1:
        why = "of parts of rows with files there are no logits, only the loss of words"
        _refuse("--sequence-parallel", against, why)


def _refuse(option: str, against: Mapping[str, object], why: str) -> None:
    """Raise ConfigError for an option that does not go with one of these which is given."""
    for other, given in against.items():
        if given:
            raise ConfigError(f"{option} and {other}: {why}. Leave one of them out.")
