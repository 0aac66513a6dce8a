"""Losses and implementations of them that cannot be combined; each of these functions raises ConfigError."""

from __future__ import annotations

from collections.abc import Mapping

from shardproof.data.encoding.weights import weights_named
from shardproof.errors import ConfigError
from shardproof.models.families.family import TALKER
from shardproof.plugins import KINDS
from shardproof.train.options.config import SftConfig


def check_spoken_loss(config: SftConfig) -> None:
    """The model's own forward adds the loss on speech codes to the loss on text."""
    if TALKER not in (config.train_parts or ()):
        return
    if config.loss == "all":
        raise ConfigError(
            f"--loss all and --train-parts {TALKER}: a {TALKER} speaks the last answer, which starts after the"
            f" tokens that are not trained on. Leave one of them out."
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
    """Label smoothing is part of our own causal loss over full rows."""
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
    """The settings that cannot be combined with token weights, and whether each is given."""
    return {
        f"--loss {config.loss}": config.loss not in KINDS["loss"].built_in,
        f"--train-parts {TALKER}": TALKER in (config.train_parts or ()),
    }


def check_weights(config: SftConfig) -> None:
    """Token weights are part of our own causal loss."""
    if config.token_weights:
        _refuse("--token-weights", weighs(config), "that loss gives all tokens the same weight")
        weights_named(config.token_weights)


def check_balance(config: SftConfig) -> None:
    """The load-balancing term is computed from router outputs in the model's own forward, over full rows."""
    if not config.router_aux_loss_coef:
        return
    against = {
        "--chunked-loss": config.chunked_loss,
        "--liger-kernel": config.liger_kernel,
        "--sequence-parallel": config.sequence_parallel > 1,
        f"--train-parts {TALKER}": TALKER in (config.train_parts or ()),
    }
    _refuse("--router-aux-loss-coef", against, "that loss has no load-balancing term")
    if config.checkpointing_reentrant:
        raise ConfigError(
            "--router-aux-loss-coef and --checkpointing-reentrant: router outputs have no gradient inside reentrant"
            " checkpoints. "
            "Leave --checkpointing-reentrant out."
        )


def check_laid_out_files(config: SftConfig) -> None:
    """For packed rows with files, and for parts of rows, the loss is computed from the hidden states before the
    head."""
    against = {
        f"--loss {config.loss}": config.loss not in KINDS["loss"].built_in,
        "--metrics": config.metrics,
        "--liger-kernel": config.liger_kernel,
        "--router-aux-loss-coef": config.router_aux_loss_coef,
        f"--train-parts {TALKER}": TALKER in (config.train_parts or ()),
    }
    if config.packing:
        _refuse("--packing", against, "packed rows with files have no logits, only the loss on text")
    if config.sequence_parallel > 1:
        why = "parts of rows with files have no logits, only the loss on text"
        _refuse("--sequence-parallel", against, why)


def _refuse(option: str, against: Mapping[str, object], why: str) -> None:
    """Raise ConfigError if one of these is given, with which the option cannot be combined."""
    for other, given in against.items():
        if given:
            raise ConfigError(f"{option} and {other}: {why}. Leave one of them out.")
