"""Promise: the chunked cross entropy has the loss and the gradients of whole logits, at the price of three products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import shardproof
from shardproof.errors import EngineError
from shardproof.train.losses.chunked import LEAST, chunked_cross_entropy

WIDTH, VOCABULARY = 16, 300
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
PRECISION = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def made(tokens: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple[list[Any], torch.Tensor]:
    """Hidden states, head and bias, and targets."""
    draw = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)]
    tensors: list[Any] = [torch.randn(s, generator=draw).mul(0.5).to(dtype).requires_grad_() for s in shapes]
    return tensors if bias else [*tensors[:2], None], torch.randint(VOCABULARY, (tokens,), generator=draw)


def whole(tensors: list[Any], targets: torch.Tensor, divisor: Any) -> torch.Tensor:
    hidden, weight, bias = (None if x is None else x.double() for x in tensors)
    return F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="sum") / divisor


def gradients(loss: torch.Tensor, tensors: list[Any], factor: float = 3.0) -> list[torch.Tensor | None]:
    for x in tensors:
        if x is not None:
            x.grad = None
    (loss * factor).backward()
    return [None if x is None or x.grad is None else x.grad.double() / factor for x in tensors]


def off(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    return float((got - expected).abs().max() / expected.abs().max())


class Products(TorchDispatchMode):
    """How many matrix products there were, each as often as it has tokens, and what it has met of the vocabulary."""

    tokens = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = func._schema.name.removeprefix("aten::")
        if kind in ("mm", "addmm", "addmm_"):
            a, b = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            self.tokens += a.shape[0] * a.shape[1] * b.shape[1] // (WIDTH * VOCABULARY)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, LEAST, 2 * LEAST + 77])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_those_of_whole_logits(dtype, tokens, bias):
    tensors, targets = made(tokens, dtype, bias)
    expected, loss = whole(tensors, targets, 7), chunked_cross_entropy(*tensors, targets, torch.tensor(7))
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert off(loss.detach().double(), expected.detach()) < PRECISION[dtype] / 10
    for got, known in zip(gradients(loss, tensors), gradients(expected, tensors), strict=True):
        assert (got is None) == (known is None)
        assert got is None or off(got, known) < PRECISION[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("frozen", [(1,), (0,), (0, 1), (0, 1, 2), ()], ids=str)
def test_only_gradients_that_are_wanted_are_made_and_no_product_twice(dtype, frozen):
    tensors, targets = made(2 * LEAST + 77, dtype)
    for i in frozen:
        tensors[i].requires_grad_(False)
    with Products() as products:
        loss = chunked_cross_entropy(*tensors, targets, 1)
        if loss.requires_grad:
            loss.backward()
    assert [x.grad is None for x in tensors] == [i in frozen for i in range(3)]
    again = dtype == torch.float16 and len(frozen) < 3
    assert products.tokens == len(targets) * (3 - (0 in frozen) - (1 in frozen) + again)
    with Products() as products, torch.no_grad():
        alone = chunked_cross_entropy(*tensors, targets, 1)
    assert products.tokens == len(targets)
    assert torch.equal(alone, loss.detach())
    assert not alone.requires_grad


def test_of_no_tokens_there_is_a_gradient_of_zeros():
    """A rank whose rows teach nothing takes part in the reductions of the others."""
    tensors, targets = made(0)
    assert [x.count_nonzero() for x in gradients(chunked_cross_entropy(*tensors, targets, 5), tensors)] == [0, 0, 0]


def test_gradients_in_fp16_meet_the_loss_scale_before_they_are_rounded():
    """Of 20,000 classes a token's probabilities are about 5e-5, divided by 4096 tokens below the smallest of fp16."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, WIDTH, generator=draw).half().requires_grad_()
    weight = (torch.randn(20_000, WIDTH, generator=draw) * 0.1).half().requires_grad_()
    targets = torch.randint(20_000, (64,), generator=draw)
    tensors = [hidden, weight, None]
    exact: list[Any] = [hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), None]
    expected = gradients(whole(exact, targets, 4096), exact)
    got = gradients(chunked_cross_entropy(*tensors, targets, 4096), tensors, 2.0**16)
    for mine, known in zip(got[:2], expected[:2], strict=True):
        assert off(mine, known) < PRECISION[torch.float16]
        small = known.abs() < known.abs().max() / 100  # classes that no token is: of these all would be lost
        assert off(mine[small], known[small]) < 0.01


def test_many_chunks_in_bf16_are_added_up_in_float32():
    """Each of the same tokens: in bf16 the sum would stand still, since the 257th part of it is rounded away."""
    tensors, targets = made(LEAST, torch.bfloat16)
    hidden, weight, bias = tensors
    many = hidden.detach().repeat(300, 1).requires_grad_()
    got = gradients(chunked_cross_entropy(many, weight, bias, targets.repeat(300), 300), [many, weight, bias])
    expected = gradients(whole(tensors, targets, 1), tensors)
    for mine, known in zip(got[1:], expected[1:], strict=True):
        assert off(mine, known) < PRECISION[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_its_gradients_cannot_do_is_said(dtype):
    tensors, targets = made(5, dtype)
    loss = chunked_cross_entropy(*tensors, targets, 1)
    loss.backward(retain_graph=True)
    with pytest.raises(EngineError, match="leave --chunked-loss out"):
        loss.backward()
    with pytest.raises(EngineError, match="no second derivative"):
        torch.autograd.grad(chunked_cross_entropy(*tensors, targets, 1), tensors[:1], create_graph=True)


ROWS = 2 * LEAST + 90


def two_ranks(stage: int, precision: torch.dtype, kind: str) -> tuple[float, dict[str, torch.Tensor], int]:
    """The loss of this rank, the mean gradients, and how often the head was gathered."""
    model, targets = small(kind)
    mixed = None if precision == torch.float32 else shardproof.MixedPrecision(compute=precision)
    model = shardproof.shard(model, stage, mixed_precision=mixed, units=["embed", "head"])
    mine = targets.view(2, -1)[dist.get_rank()]
    loss = chunked_cross_entropy(model(mine), model.head.weight, model.head.bias, mine, len(mine))
    (loss * 1024).backward()
    found = {n: p.grad.whole() / 1024 for n, p in model.named_parameters() if p.grad is not None}
    unit = next(unit for name, unit in shardproof.stats(model).units.items() if "head" in name)
    return float(loss.detach()), found, unit.gathers


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.embed(ids))


def small(kind: str) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    model = Small()
    if kind == "tied":
        model.head.weight = model.embed.weight
    model.head.weight.requires_grad_(kind != "frozen")
    return model, torch.randint(VOCABULARY, (2 * ROWS,))


@pytest.mark.parametrize(
    ("stage", "precision", "kind"),
    [
        (0, torch.bfloat16, "tied"),
        (1, torch.float32, "tied"),
        (2, torch.float16, "tied"),
        (2, torch.bfloat16, "frozen"),
        (3, torch.float32, ""),
        (3, torch.bfloat16, ""),
        (3, torch.float16, "frozen"),
        (3, torch.bfloat16, "tied"),
    ],
    ids=str,
)
def test_a_sharded_head_learns_as_a_whole_one(run2, stage, precision, kind):
    model, targets = small(kind)
    whole([model(targets), model.head.weight, model.head.bias], targets, len(targets)).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for _, found, gathers in run2(two_ranks, stage, precision, kind):
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            assert off(gradient, expected[name]) < max(1e-5, 2 * PRECISION[precision]), name
        if kind != "tied" and stage == 3:
            assert gathers == (2 if precision == torch.float16 else 1), "backward needs it again only in fp16"
