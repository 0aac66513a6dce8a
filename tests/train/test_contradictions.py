"""Promise: an option that would silently do nothing, or contradicts another, is refused before anything is read."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from shardproof.errors import ConfigError
from shardproof.train.checks.contradictions import check_together
from shardproof.train.checks.scheduler import OF_SCHEDULER
from shardproof.train.options.config import SftConfig


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"lora_rank": 8}, "--lora-rank applies to adapters"),
        ({"target_modules": ["q_proj"]}, "--target-modules applies to adapters"),
        ({"checkpointing_reentrant": True}, "add --gradient-checkpointing"),
        ({"checkpointing_reentrant": True, "gradient_checkpointing": "selective"}, "selective is not reentrant"),
        ({"keep_gathered": 2.0, "stage": 2}, "--keep-gathered needs --stage 3"),
        ({"compile": True, "deterministic": True}, "--deterministic and --compile"),
        ({"shard_group": 2, "deterministic": True}, "--deterministic and --shard-group"),
        ({"optimizer": "adamw_8bit", "deterministic": True}, "--deterministic and --optimizer adamw_8bit"),
        ({"reduce_dtype": "bf16"}, "add --precision bf16"),
        ({"reduce_dtype": "bf16", "precision": "bf16", "stochastic_rounding": True}, "gradients are already bf16"),
        ({"fp8": True}, "add --precision bf16"),
        ({"liger_kernel": True, "sequence_parallel": 2}, "--sequence-parallel and --liger-kernel"),
        ({"fp8": True, "precision": "bf16", "tuner": "lora"}, "a frozen base gains little"),
        ({"stochastic_rounding": True}, "add --precision bf16"),
        ({"stochastic_rounding": True, "precision": "bf16", "optimizer": "adamw_8bit"}, "leave one of them out"),
        ({"stochastic_rounding": True, "precision": "bf16", "tuner": "lora"}, "adapters have few weights"),
        ({"quantize": "nf4"}, "--quantize applies to adapters"),
        ({"quantize": "nf4", "tuner": "lora", "dora": True}, "--quantize and --dora"),
        ({"quantize": "nf4", "tuner": "lora", "compile": True}, "--quantize and --compile"),
        ({"optimizer": "adamw_8bit", "min_processes": 1}, "cannot be redistributed to fewer"),
        ({"optimizer": "muon", "tuner": "lora", "adam_beta2": 0.9}, "adapters are matrices"),
        ({"group_by_length": True, "packing": True}, "already have the same length"),
        ({"padding_free": True, "packing": True}, "packed rows have no padding"),
        ({"padding_free": True, "compile": True}, "recompiled for each number of tokens"),
        ({"padding_free": True, "neftune_noise_alpha": 5.0}, "depends on the length of the row"),
        ({"padding_free": True, "sequence_parallel": 2}, "--sequence-parallel and --padding-free"),
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, "give one of them"),
        ({"lr_scheduler": "constant", "warmup_steps": 3}, "use constant_with_warmup"),
        ({"optimizer": "mine", "adam_beta2": 0.95}, "--adam-beta2 applies to AdamW"),
        ({"lr_scheduler_kwargs": {"min_lr": 1e-6}}, "min_lr: cosine has no such argument"),
        ({"lr_scheduler": "polynomial", "lr_scheduler_kwargs": {"powr": 2.0}}, "Did you mean power?"),
        ({"lr_scheduler": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1e-4}}, "0.0001 is not above"),
        ({"lr_scheduler": "polynomial", "learning_rate": 1e-8}, "lr_end, which is 1e-07"),
        ({"lr_scheduler": "inverse_sqrt", "lr_scheduler_kwargs": {"timescale": 0}}, "timescale=0: it must be more"),
        ({"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": -1}}, "min_lr=-1: it must be 0"),
        ({"freeze": ["vit"]}, "--freeze vit: the parts are llm, vision, audio, aligner, talker."),
        ({"train_parts": ["thinkr"]}, "--train-parts thinkr: the parts are"),
        ({"part_learning_rates": {"vit": 1e-5}}, "--part-learning-rates vit: the parts are"),
        ({"remote_media_cache": "kept"}, "none without --allow-remote-media"),
        ({"lr_scheduler": "cosine_with_min_lr"}, "needs one of min_lr and min_lr_rate"),
        ({"stopping_strategy": "all_exhausted"}, "--stopping-strategy sets when a mixture of datasets ends: add"),
        ({"interleave_prob": [0.5, 0.5], "dataset": ["a"]}, "has 2 share(s) for 1 dataset(s)"),
        ({"interleave_prob": [0.5, 0.4], "dataset": ["a", "b"]}, "shares must sum to 1, and these sum to 0.9"),
    ],
)
def test_what_does_not_go_together(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_together(SftConfig(**given))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"tuner": "lora", "lora_rank": 8},
        {"gradient_checkpointing": True, "checkpointing_reentrant": True},
        {"precision": "bf16", "reduce_dtype": "bf16"},
        {"warmup_steps": 3},
        {"train_parts": ["thinker", "talker"], "freeze": ["vision"], "part_learning_rates": {"aligner": 1e-4}},
        {"lr_scheduler": "constant"},
        {"interleave_prob": [0.1] * 10, "dataset": list("abcdefghij"), "stopping_strategy": "all_exhausted"},
        {"lr_scheduler": "constant", "warmup_ratio": 0.0},
        {"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        {"lr_scheduler": "polynomial", "lr_scheduler_kwargs": {"lr_end": 0.0}},
        SftConfig().model_dump(),  # as a run's config.yaml holds it
    ],
)
def test_what_does(given: dict[str, Any]) -> None:
    check_together(SftConfig(**given))


def test_the_arguments_of_schedules_are_those_of_transformers() -> None:
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    own = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    kinds = SftConfig.model_fields["lr_scheduler"].annotation.__args__
    theirs = {kind: set(inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[kind]).parameters) - own for kind in kinds}
    assert {kind: set(OF_SCHEDULER.get(kind, ())) for kind in kinds} == theirs


def test_short_runs_of_doctor_and_verify_contradict_nothing() -> None:
    from shardproof.doctor.observe import short_run

    given = {"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}, "warmup_steps": 3}
    config = SftConfig(**given)
    check_together(short_run(config, config.batch(1), 1, 2, "out"))
