"""Promise: classifiers and regressions have the losses and measures of one process on whole batches, at every stage,
with adapters, and however rows are dealt out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardproof.data.forms.labels import MULTI, REGRESSION, SINGLE, Labels
from shardproof.train.seq_cls.measures import LabelLoss, means, sums

COMMON = "--max-steps 4 --learning-rate 3e-3 --lr-scheduler constant --eval-steps 2 --global-batch-size 8".split()
STAGES = [{"stage": stage} for stage in range(4)]
LORA = {"tuner": "lora", "lora_rank": 4}
ROWS = {
    "named": ["--label-names", "low", "high", "odd"],
    "several": ["--num-labels", "3", "--problem-type", "multi_label_classification"],
    "amount": ["--problem-type", "regression"],
    "amounts": ["--num-labels", "2", "--problem-type", "regression"],
}


def check(trained: Any, model: str, rows: str, variants: list[dict[str, Any]], **more: Any) -> None:
    options = [*COMMON, *ROWS[rows], "--model", f"MODELS/{model}"]
    options += ["--dataset", f"FILES/{rows}.jsonl", "--val-dataset", f"FILES/{rows}-held.jsonl"]
    whole = {"stage": 0, "per_device_batch_size": 8, "gradient_accumulation_steps": 1, **more}
    ((expected, _),) = trained(1, [whole], *options)
    many = [{"per_device_batch_size": 2, "gradient_accumulation_steps": 2, **variant, **more} for variant in variants]
    for variant, (got, _) in zip(many, trained(2, many, *options), strict=True):
        for key in ("loss", "grad_norm", "eval_loss", "eval_accuracy", "eval_macro_f1", "eval_mae", "eval_pearson"):
            near = {"abs": 1e-5} if "loss" in key else {"rel": 2e-4, "abs": 1e-4 if key == "eval_pearson" else 1e-6}
            mine, one_s = ([record[key] for record in records if key in record] for records in (got, expected))
            assert mine == pytest.approx(one_s, **near), f"{key}: {variant}"
    assert len([record for record in expected if "loss" in record]) == 4
    assert len([record for record in expected if "eval_loss" in record]) == 2
    assert all(record["grad_norm"] > 1e-3 for record in expected if "grad_norm" in record)


def test_a_decoder_at_every_stage(trained) -> None:
    check(trained, "decoder", "named", STAGES)


@pytest.mark.slow
def test_an_encoder_and_several_labels(trained) -> None:
    check(trained, "encoder", "several", [{"stage": 2}, {"stage": 3}])


SHARED = {"sequence_parallel": 2, "gradient_accumulation_steps": 4}


@pytest.mark.slow
def test_rows_that_ranks_share(trained) -> None:
    check(trained, "decoder", "named", [{"stage": 3, **SHARED}, {"stage": 2, "gradient_checkpointing": True, **SHARED}])


def test_an_encoder_that_judges_by_the_first_token_of_its_part_is_refused(trained) -> None:
    with pytest.raises(Exception, match="in BertForSequenceClassification, what becomes of a token depends"):
        check(trained, "encoder", "named", [{"stage": 3, **SHARED}])


@pytest.mark.slow
def test_a_model_that_judges_by_the_last_place_takes_rows_one_by_one(trained, models, tmp_path) -> None:
    """XLNet's padding stands in front of rows, and here behind them."""
    from transformers import AutoTokenizer, XLNetConfig, XLNetLMHeadModel

    tokenizer = AutoTokenizer.from_pretrained(models["encoder"])
    sizes = {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48, "dropout": 0.0, "summary_last_dropout": 0.0}
    XLNetLMHeadModel(XLNetConfig(vocab_size=len(tokenizer), pad_token_id=0, **sizes)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = [*COMMON, *ROWS["named"], "--model", str(tmp_path), "--dataset", "FILES/named.jsonl"]
    options += ["--val-dataset", "FILES/named-held.jsonl", "--truncation", "right"]
    whole = {"per_device_batch_size": 8}
    with pytest.raises(Exception, match=r"XLNetForSequenceClassification treats a row beside.*-batch-size 1"):
        trained(1, [whole], *options)
    single = {"stage": 3, "per_device_batch_size": 1}
    ((one, _),), ((two, _),) = (trained(world, [single], *options) for world in (1, 2))
    for key in ("loss", "eval_loss"):
        mine, one_s = ([record[key] for record in records if key in record] for records in (two, one))
        assert mine == pytest.approx(one_s, abs=1e-5)


@pytest.mark.slow
def test_a_number_to_predict(trained) -> None:
    check(trained, "encoder", "amount", [{"stage": 1}, {"stage": 3}])


@pytest.mark.slow
def test_adapters(trained) -> None:
    check(trained, "decoder", "named", [{"stage": 0}, {"stage": 3}], **LORA)
    check(trained, "encoder", "several", [{"stage": 3}], **LORA)


@pytest.mark.slow
@pytest.mark.parametrize("begin", ["pissa", "pissa_niter_3", "olora", "orthogonal"])
def test_adapters_that_begin_otherwise(trained, begin: str) -> None:
    check(trained, "decoder", "named", STAGES, **LORA, init_lora_weights=begin)
    check(trained, "encoder", "several", [{"stage": 3}], **LORA, init_lora_weights=begin)


@pytest.mark.slow
def test_the_rest(trained) -> None:
    for model in ("decoder", "encoder"):
        for rows in ROWS:
            check(trained, model, rows, STAGES)
            check(trained, model, rows, STAGES, **LORA)


@pytest.mark.parametrize("problem", [SINGLE, MULTI, REGRESSION])
def test_the_loss_is_that_of_transformers(problem: Any) -> None:
    from transformers import PretrainedConfig
    from transformers.loss.loss_utils import ForSequenceClassificationLoss

    count = 1 if problem == REGRESSION else 3
    logits, labels = torch.randn(6, count), Labels.numbered(count, problem)
    given = torch.randint(0, 3, (6,)) if problem == SINGLE else torch.randint(0, 2, (6, count)).float()
    config = PretrainedConfig(num_labels=count, problem_type=problem)
    theirs = ForSequenceClassificationLoss(given, logits, config)
    loss = LabelLoss(labels)
    torch.testing.assert_close(loss({"logits": logits}, given), theirs)
    parts = [loss({"logits": logits[part]}, given[part], 6) for part in (slice(1), slice(1, 6))]
    torch.testing.assert_close(sum(parts), theirs)


def test_measures_are_those_of_scikit_learn() -> None:
    from sklearn.metrics import accuracy_score, f1_score

    logits = torch.randn(50, 4)
    logits[:, 3] = -9.0  # never said
    single, given = Labels.numbered(4), torch.randint(0, 3, (50,))
    found = added(single, logits, given)
    assert found["accuracy"] == pytest.approx(accuracy_score(given, logits.argmax(-1)))
    assert found["macro_f1"] == pytest.approx(f1_score(given, logits.argmax(-1), average="macro"))
    several, many = Labels.numbered(4, MULTI), torch.randint(0, 2, (50, 4))
    found = added(several, logits, many)
    assert found["accuracy"] == pytest.approx(accuracy_score(many, logits > 0))
    assert found["macro_f1"] == pytest.approx(f1_score(many, logits > 0, average="macro", zero_division=0))
    amounts = torch.randn(50, 1) + 100
    found = added(Labels.numbered(1), amounts + torch.randn(50, 1), amounts)
    assert 0.3 < found["pearson"] < 1
    assert added(Labels.numbered(1), 2 * amounts + 1, amounts)["pearson"] == pytest.approx(1)
    assert added(Labels.numbered(1), amounts + 3, amounts)["mae"] == pytest.approx(3)


def added(labels: Labels, logits: torch.Tensor, given: torch.Tensor) -> dict[str, float]:
    """The measures of two batches."""
    parts = (sums(labels, logits[part], given[part]) for part in (slice(20), slice(20, 50)))
    return means(labels, [a + b for a, b in zip(*parts, strict=True)])
