"""Options of `shardproof rlhf` that contradict each other."""

from __future__ import annotations

from shardproof.errors import ConfigError
from shardproof.train.options.option import flag
from shardproof.train.options.rlhf_config import RlhfConfig, draws_answers


def check_ends(config: RlhfConfig) -> None:
    """Raise ConfigError for stop words that cannot work."""
    against = {
        "mask_truncated_completions": "TRL treats an answer that ends at a stop word as truncated",
        **dict.fromkeys(("tools", "environments"), "an answer stops at a call and continues after it"),
    }
    for name, why in against.items():
        if config.stop_words and getattr(config, name):
            raise ConfigError(f"--stop-words and {flag(name)}: {why}. Leave one of them out.")
    if config.stop_words and config.rlhf_type == "gkd" and not (config.lmbda or config.seq_kd):
        raise ConfigError("--stop-words: with --lmbda 0 no answers are generated. Leave it out, or add --seq-kd.")


def check_shared(config: RlhfConfig) -> None:
    """Raise ConfigError if ranks share rows but would each generate their own answers to them."""
    if config.sequence_parallel > 1 and config.rlhf_type == "gkd" and draws_answers(config):
        raise ConfigError(
            "--sequence-parallel: gkd shares only rows whose answers exist already, and here each process would"
            " generate its own. Add --lmbda 0 without --seq-kd, or leave it out."
        )


def check_can_go_on(config: RlhfConfig) -> None:
    """Raise ConfigError for a run that could not be resumed exactly from its checkpoints."""
    if config.resume is None and (config.save_only_model or not config.writes_checkpoints):
        return
    why = None
    if config.rlhf_type == "ppo":
        why = "--rlhf-type ppo trains two models, and a checkpoint holds one"
    if config.sync_ref_steps:
        why = "--sync-ref-steps moves the reference, which is not in a checkpoint"
    if config.precompute_ref:
        why = "--precompute-ref runs the model as it was before the first step, which is gone when a run is resumed"
    if why:
        raise ConfigError(f"{why}: leave out --save-steps and --resume, or add --save-only-model.")
