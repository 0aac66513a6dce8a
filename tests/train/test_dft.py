"""Promise: dynamic fine-tuning is each token's loss times its probability, the same at any stage and number of
processes, packed or not, with whole logits or without."""

from __future__ import annotations

import pytest
import torch

from shardproof.train.losses.chunked import chunked_cross_entropy
from shardproof.train.losses.tokens import dft_loss
from train.token_losses import assert_same, drawn

pytestmark = pytest.mark.slow


def by_hand(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of each learnt token -p log p, in which the first p is a constant."""
    odds = (hidden @ head.T).log_softmax(-1)
    terms = [
        -odds[row, at - 1, token].detach().exp() * odds[row, at - 1, token]
        for row in range(len(labels))
        for at, token in enumerate(labels[row].tolist())
        if at and token != -100
    ]
    return torch.stack(terms).sum() / 7


@pytest.mark.parametrize("chunked", [False, True])
def test_loss_and_gradients_are_those_of_the_formula(chunked: bool) -> None:
    hidden, head, labels = drawn()
    expected = torch.autograd.grad(wanted := by_hand(hidden, head, labels), (hidden, head))
    if chunked:
        learnt = labels[:, 1:].ne(-100)
        loss = chunked_cross_entropy(hidden[:, :-1][learnt], head, None, labels[:, 1:][learnt], 7, dft=True)
    else:
        loss = dft_loss({"logits": hidden @ head.T}, labels, num_items_in_batch=7)
    assert_same(loss, wanted, (hidden, head), expected)


ONE = ["--loss-type", "dft", "--nproc", "1", "--stage", "0"]
TWO = ["--loss-type", "dft", "--nproc", "2", "--stage", "3", "--chunked-loss"]


@pytest.fixture(scope="module")
def runs(commands, sft, rows):
    evaluated = ["--val-dataset", str(rows)]
    return commands(
        [
            ("one", sft(*ONE, *evaluated)),
            ("two", sft(*TWO, *evaluated)),
            ("plugin", sft("--loss-type", "dft", "--loss", "mine")),
            ("parts", sft("--loss-type", "dft", "--sequence-parallel", "2", "--nproc", "2")),
        ]
    )


def same(one, two) -> None:
    assert one.code == two.code == 0, one.output + two.output
    assert len(one.series("loss")) == 5
    for name in ("loss", "eval_loss"):
        assert two.series(name) == pytest.approx(one.series(name), abs=1e-5)
    assert two.series("grad_norm") == pytest.approx(one.series("grad_norm"), rel=1e-4)
    assert max(one.series("loss")) < 0.5  # -p log p is 1/e at most; the plain loss of a new model is 7


def test_losses_are_those_of_one_process(runs) -> None:
    same(runs["one"], runs["two"])
    assert len(runs["one"].series("eval_loss")) == 1


@pytest.mark.slow
def test_so_they_are_of_packed_rows(commands, sft) -> None:
    packed = "--packing --max-length 96 --global-batch-size 2".split()
    done = commands([("one", sft(*ONE, *packed)), ("two", sft(*TWO, *packed))])
    same(done["one"], done["two"])


def test_what_it_does_not_go_together_with(runs) -> None:
    assert "--loss-type dft and --loss mine are two losses" in runs["plugin"].output
    assert "--sequence-parallel and --loss-type dft" in runs["parts"].output
    assert runs["plugin"].code == runs["parts"].code == 2
