"""Promise: --label-smoothing-factor is transformers' LabelSmoother, at any stage and number of processes,
packed or not, with whole logits or without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.trainer_pt_utils import LabelSmoother

from shardproof.errors import ConfigError
from shardproof.train.losses.chunked import chunked_cross_entropy
from shardproof.train.losses.tokens import smoothed_loss
from shardproof.train.options.config import SftConfig
from shardproof.train.run import recipe_of
from train.token_losses import assert_same, drawn

pytestmark = pytest.mark.slow

FACTOR = 0.2


@pytest.mark.parametrize("items", [None, 7])
@pytest.mark.parametrize("chunked", [False, True])
def test_loss_and_gradients_are_those_of_transformers(chunked: bool, items: int | None) -> None:
    hidden, head, labels = drawn()
    bias = torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    outputs = {"logits": hidden @ head.T + bias}
    wanted = LabelSmoother(FACTOR)(outputs, labels, shift_labels=True, num_items_in_batch=items)
    expected = torch.autograd.grad(wanted, (hidden, head, bias))
    if chunked:
        learnt = labels[:, 1:].ne(-100)
        targets = labels[:, 1:][learnt]
        loss = chunked_cross_entropy(
            hidden[:, :-1][learnt], head, bias, targets, items or len(targets), smoothing=FACTOR
        )
    else:
        loss = smoothed_loss({"logits": hidden @ head.T + bias}, labels, items, FACTOR)
    assert_same(loss, wanted, (hidden, head, bias), expected)


ONE = ["--label-smoothing-factor", str(FACTOR), "--nproc", "1", "--stage", "0"]
TWO = ["--label-smoothing-factor", str(FACTOR), "--nproc", "2", "--stage", "3", "--chunked-loss"]
PACKED = "--packing --max-length 96 --global-batch-size 2".split()


@pytest.fixture(scope="module")
def runs(commands, sft, rows):
    evaluated = ["--val-dataset", str(rows)]
    return commands(
        [
            ("one", sft(*ONE, *evaluated)),
            ("two", sft(*TWO, *evaluated)),
            ("packed one", sft(*ONE, *PACKED)),
            ("packed two", sft(*TWO, *PACKED)),
            ("plain", sft("--nproc", "1", "--stage", "0", *evaluated)),
        ]
    )


@pytest.mark.parametrize("how", ["", "packed "])
def test_losses_are_those_of_one_process(runs, how: str) -> None:
    one, two = runs[f"{how}one"], runs[f"{how}two"]
    assert one.code == two.code == 0, one.output + two.output
    assert len(one.series("loss")) == 5
    for name in ("loss", "eval_loss"):
        assert two.series(name) == pytest.approx(one.series(name), abs=1e-5)
    assert two.series("grad_norm") == pytest.approx(one.series("grad_norm"), rel=1e-4)


def test_it_changes_what_is_learnt(runs) -> None:
    """Of a new model, all tokens are alike; of a trained one, what is asked for besides costs something."""
    plain, smoothed = runs["plain"], runs["one"]
    assert smoothed.series("loss")[0] == pytest.approx(plain.series("loss")[0], rel=0.05)
    assert smoothed.series("eval_loss")[-1] > plain.series("eval_loss")[-1] + 0.1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"loss_type": "dft"}, "--loss-type dft"),
        ({"loss": "mine"}, "--loss mine"),
        ({"sequence_parallel": 2}, "--sequence-parallel"),
        ({"train_parts": ["talker"]}, "--train-parts talker"),
        ({"task": "embedding"}, "--task embedding and --label-smoothing-factor: no tokens are learned"),
        ({"task": "reranker"}, "--task reranker and --label-smoothing-factor"),
        ({"task": "seq_cls", "num_labels": 2}, "--task seq_cls and --label-smoothing-factor"),
    ],
)
def test_other_losses_are_not_smoothed(options: dict[str, Any], why: str) -> None:
    config = SftConfig(model="tiny", dataset=["x.jsonl"], label_smoothing_factor=0.1, **options)
    with pytest.raises(ConfigError, match=why):
        recipe_of(config).check(config, 2)


def test_nor_with_kernels_that_know_no_smoothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardproof.train.sft import recipe as sft

    monkeypatch.setattr(sft.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="--label-smoothing-factor and --liger-kernel"):
        sft.check(SftConfig(model="tiny", dataset=["x"], label_smoothing_factor=0.1, liger_kernel=True), 1)
