"""Promise: rerankers have the losses and measures of one process on whole batches, at every stage, with adapters, and
however rows of different numbers of texts are dealt out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from shardproof.train.reranker import ranking

pytestmark = pytest.mark.slow

COMMON = "--max-steps 4 --learning-rate 3e-3 --lr-scheduler constant --eval-steps 2 --global-batch-size 8".split()
KEYS = ("loss", "grad_norm", "eval_loss", "eval_accuracy", "eval_mrr", "eval_ndcg")


def check(trained: Any, model: str, variants: list[dict[str, Any]], **more: Any) -> None:
    options = [*COMMON, "--model", f"MODELS/{model}", "--truncation", "right"]
    whole = {"stage": 0, "per_device_batch_size": 8, "gradient_accumulation_steps": 1, **more}
    (expected,) = trained(1, [whole], *options)
    many = [{"per_device_batch_size": 2, "gradient_accumulation_steps": 2, **variant, **more} for variant in variants]
    for variant, got in zip(many, trained(2, many, *options), strict=True):
        for key in KEYS:
            near = {"abs": 1e-5} if "loss" in key else {"rel": 2e-4, "abs": 1e-6}
            mine, one_s = ([record[key] for record in records if key in record] for records in (got, expected))
            assert mine == pytest.approx(one_s, **near), f"{key}: {variant}"
    assert len([record for record in expected if "loss" in record]) == 4
    assert len([record for record in expected if "eval_ndcg" in record]) == 2
    assert all(record["grad_norm"] > 1e-3 for record in expected if "grad_norm" in record)


def test_pairs_on_an_encoder(trained) -> None:
    check(trained, "encoder", [{"stage": 0}, {"stage": 3}])


@pytest.mark.slow
def test_lists_on_a_decoder(trained) -> None:
    check(trained, "decoder", [{"stage": 2}, {"stage": 3}], loss="listwise", loss_temperature=0.5)
    check(trained, "decoder", [{"stage": 3}], loss="listwise", tuner="lora", lora_rank=4)


@pytest.mark.slow
@pytest.mark.parametrize("task, model", [("reranker", "decoder"), ("generative_reranker", "asked")])
def test_rows_that_ranks_share(trained, task: str, model: str) -> None:
    shared = {"sequence_parallel": 2, "gradient_accumulation_steps": 4}
    check(trained, model, [{"stage": 3, **shared}], task=task, loss="listwise", loss_temperature=0.5)


@pytest.mark.parametrize("task, model", [("reranker", "decoder"), ("generative_reranker", "asked")])
def test_attention_that_leaves_padding_out_changes_nothing(trained, task: str, model: str) -> None:
    options = [*COMMON, "--model", f"MODELS/{model}", "--truncation", "right"]
    whole = {"task": task, "stage": 0, "per_device_batch_size": 8, "gradient_accumulation_steps": 1}
    one, other = trained(1, [{**whole, "attn": "sdpa"}, {**whole, "attn": "varlen"}], *options)
    for key in KEYS:
        mine, expected = ([record[key] for record in records if key in record] for records in (other, one))
        assert mine == pytest.approx(expected, rel=2e-4, abs=1e-5), key


def test_losses_are_cross_entropies() -> None:
    scores, counts = torch.randn(7), [3, 4]
    relevant = torch.tensor([1.0, 0, 0, 1, 1, 0, 0])
    pairs = sum(math.log1p(math.exp(-s if r else s)) for s, r in zip(scores.tolist(), relevant.tolist(), strict=True))
    assert ranking.pointwise(scores, relevant, counts, 1.0).item() == pytest.approx(pairs, rel=1e-5)
    lists = [scores[[0, 1, 2]], scores[[3, 5, 6]], scores[[4, 5, 6]]]
    expected = sum(functional.cross_entropy(each / 0.5, torch.tensor(0)) for each in lists)
    torch.testing.assert_close(ranking.listwise(scores, relevant, counts, 0.5), expected)


def test_measures_are_those_of_scikit_learn() -> None:
    from sklearn.metrics import ndcg_score

    scores, counts, chance = torch.randn(60), [6] * 10, torch.Generator().manual_seed(0)
    relevant = torch.rand(60, generator=chance).view(10, 6)
    relevant = (relevant > relevant.median(1, keepdim=True).values).float()
    measured = ranking.means(ranking.sums(scores, relevant.flatten(), counts))
    assert measured["ndcg"] == pytest.approx(ndcg_score(relevant, scores.view(10, 6)))
    order = scores.view(10, 6).argsort(descending=True)
    places = [1 + relevant[i][order[i]].tolist().index(1.0) for i in range(10)]
    assert measured["mrr"] == pytest.approx(sum(1 / place for place in places) / 10)
    assert measured["accuracy"] == sum(place == 1 for place in places) / 10
    constant = ranking.means(ranking.sums(torch.zeros(3), torch.tensor([1.0, 0, 0]), [3]))
    assert constant["mrr"] == pytest.approx(1 / 3), "a model that says nothing finds nothing"
