"""Promise: embeddings are learnt with the losses and measures of one process on whole batches, at every stage, with
adapters, and with the negatives of all ranks."""

from __future__ import annotations

from typing import Any

import pytest

COMMON = "--max-steps 4 --learning-rate 3e-3 --lr-scheduler constant --eval-steps 2 --truncation right".split()
KEYS = ("loss", "grad_norm", "eval_loss", "eval_accuracy", "eval_mrr", "eval_mean_pos", "eval_mean_neg")
STAGES = [{"stage": stage} for stage in range(4)]
LORA = {"tuner": "lora", "lora_rank": 4}


def check(trained: Any, model: str, rows: str, variants: list[dict[str, Any]], *options: str, **more: Any) -> None:
    """Two ranks with micro-batches of 4 rows are to be one process with micro-batches of 8."""
    options = (*COMMON, *options, "--model", f"MODELS/{model}")
    options += ("--dataset", f"FILES/{rows}.jsonl", "--val-dataset", f"FILES/{rows}-held.jsonl")
    shape = {"gradient_accumulation_steps": 1, **more}
    ((expected, _),) = trained(1, [{"stage": 0, "per_device_batch_size": 8, **shape}], *options)
    many = [{"per_device_batch_size": 4, **shape, **variant} for variant in variants]
    for variant, (got, _) in zip(many, trained(2, many, *options), strict=True):
        for key in (*KEYS, "eval_pearson", "eval_spearman"):
            near = {"abs": 1e-5} if "loss" in key else {"rel": 2e-4, "abs": 1e-4}
            mine, one_s = ([record[key] for record in records if key in record] for records in (got, expected))
            assert mine == pytest.approx(one_s, **near), f"{key}: {variant}"
    assert len([record for record in expected if "loss" in record]) == 4
    assert len([record for record in expected if "eval_loss" in record]) == 2
    assert all(record["grad_norm"] > 1e-3 for record in expected if "grad_norm" in record)


def test_a_decoder_at_every_stage(trained) -> None:
    check(trained, "decoder", "matched", STAGES)


@pytest.mark.slow
def test_an_encoder_and_micro_batches(trained) -> None:
    check(trained, "encoder", "matched", [{"stage": 0}, {"stage": 3}], gradient_accumulation_steps=2)


@pytest.mark.slow
def test_labels_of_pairs(trained) -> None:
    check(trained, "encoder", "scored", [{"stage": 1}, {"stage": 3}], "--loss", "cosine_similarity")
    check(trained, "decoder", "scored", [{"stage": 2}], "--loss", "contrastive", pooling="mean")


@pytest.mark.slow
def test_adapters(trained) -> None:
    check(trained, "decoder", "matched", [{"stage": 0}, {"stage": 3}], **LORA)


def test_ranks_that_share_rows(trained) -> None:
    """Two of them have the micro-batch of one."""
    shared = {"sequence_parallel": 2, "per_device_batch_size": 8}
    check(trained, "decoder", "matched", [{"stage": 3, **shared}])


@pytest.mark.slow
def test_ranks_that_share_rows_in_other_ways(trained) -> None:
    shared = {"sequence_parallel": 2, "per_device_batch_size": 8}
    for more in (LORA, {"pooling": "mean"}):
        check(trained, "decoder", "matched", [{"stage": 0, **shared}, {"stage": 1, **shared}], **more)
    check(trained, "decoder", "scored", [{"stage": 2, **shared}], "--loss", "cosine_similarity")


@pytest.mark.slow
def test_groups_of_ranks_that_share_rows(trained) -> None:
    """Four ranks in two groups, whose texts are negatives of each other."""
    options = (*COMMON, "--model", "MODELS/decoder", "--dataset", "FILES/matched.jsonl")
    options += ("--val-dataset", "FILES/matched-held.jsonl")
    shape = {"gradient_accumulation_steps": 1}
    ((one, _),) = trained(1, [{"stage": 0, "per_device_batch_size": 8, **shape}], *options)
    ((four, _),) = trained(4, [{"stage": 3, "per_device_batch_size": 4, "sequence_parallel": 2, **shape}], *options)
    for key in KEYS:
        mine, one_s = ([record[key] for record in records if key in record] for records in (four, one))
        assert mine == pytest.approx(one_s, rel=2e-4, abs=1e-5), key


@pytest.mark.slow
@pytest.mark.parametrize("begin", ["pissa", "olora"])
def test_adapters_that_begin_otherwise(trained, begin: str) -> None:
    check(trained, "decoder", "matched", STAGES, **LORA, init_lora_weights=begin)


@pytest.mark.slow
def test_the_rest(trained) -> None:
    for model in ("decoder", "encoder"):
        for pooling in ("last", "mean", "cls"):
            check(trained, model, "matched", STAGES, pooling=pooling)
        check(trained, model, "matched", STAGES, **LORA)
