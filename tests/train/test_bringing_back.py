"""Promise: what the host holds of a forward pass is on its way back before backward computes with it, whatever backward
asks for, and nothing of it stays."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from distributed.harness import Sharded, compare, train
from distributed.late_streams import LateStreams, late_streams
from distributed.two_devices import DEVICE, HOST, TwoDevices, two_devices
from shardproof.train.model import activations
from shardproof.train.model.activations import AHEAD, BEHIND, NEAR, HeldByHost
from zero.graphs import CASES as GRAPHS

LAYERS = 24
Layer = Callable[[torch.Tensor], torch.Tensor]


def late_hooks() -> HeldByHost:
    hooks = HeldByHost(DEVICE, HOST, smallest=0)
    hooks.queues = True
    return hooks


class Cube(torch.autograd.Function):
    """Saves its input; `look` is called when its backward computes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, look: Callable[[], None]) -> torch.Tensor:
        ctx.look = look
        ctx.save_for_backward(x)
        return x * x.detach().square() + 0.1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.look()
        return 3 * x.square() * grad, None


def cube(x: torch.Tensor, look: Callable[[], None] = lambda: None) -> torch.Tensor:
    result: torch.Tensor = Cube.apply(x, look)
    return result


def leaf() -> torch.Tensor:
    return (torch.arange(8, device=DEVICE) / 10).requires_grad_()


# --- when copies are queued --------------------------------------------------------------------------


def test_the_next_ones_are_under_way_while_backward_computes():
    """Of 24 layers the last four are still here; with each other one its own copy has arrived, and 16 more are
    queued, none of which has been waited for."""
    with late_streams():
        hooks, seen = late_hooks(), []

        def look(number: int) -> None:
            assert hooks._stream is not None
            seen.append((number, hooks._stream.queued - LAYERS, hooks._stream.done - LAYERS))

        x = leaf()
        with hooks:
            h = x
            for number in range(LAYERS):
                h = cube(h, lambda number=number: look(number))
        h.sum().backward()
    still_here = LAYERS - BEHIND
    assert [number for number, _, _ in seen] == list(reversed(range(LAYERS)))
    for number, queued, done in seen:
        assert queued == still_here - max(number - AHEAD, 0)
        assert done == still_here - number if number < still_here - 1 else done <= 1


def test_of_large_ones_only_the_next_is_brought_ahead():
    with two_devices(), mock.patch.object(activations, "ENOUGH", 1):
        hooks, there = HeldByHost(DEVICE, HOST, smallest=0), []
        with hooks:
            h = leaf()
            for _ in range(LAYERS):
                h = cube(h, lambda: there.append(len(hooks._here)))
        h.sum().backward()
    assert there == [4, 3, *[2] * (LAYERS - 3), 1]


def test_a_tensor_that_several_operations_saved_comes_back_once():
    with two_devices():
        hooks = Counting(DEVICE, HOST, smallest=0)
        with hooks:
            h = leaf()
            for _ in range(LAYERS):
                h = cube(h) + cube(h)
        h.sum().backward()
    assert hooks.copies == LAYERS - BEHIND


@pytest.mark.parametrize("width", [5, 12, 40])
def test_so_does_what_an_operation_asks_for_in_an_order_of_its_own(width):
    """Fused attention saves five, a compiled block more. Of forty, what was brought ahead is let go at times."""
    with two_devices():
        hooks = Counting(DEVICE, HOST, smallest=0)
        up_and_down(leaf(), hooks, width)
    assert hooks.copies <= 4 * 2 * width - BEHIND + (4 * 2 * AHEAD if width > NEAR else 0)


def test_what_all_layers_saved_holds_up_none_of_the_others():
    """As angles of rotary embeddings. It comes once for each layer from which it is far."""
    with two_devices():
        hooks = Counting(DEVICE, HOST, smallest=0)
        x = leaf()
        all_save_it = x + 1
        with hooks:
            h = x
            for _ in range(LAYERS):
                h = cube(cube(cube(h))) * all_save_it
        saved = next(hooks._numbers)
        h.sum().backward()
    assert saved == 1 + 4 * LAYERS
    assert hooks.copies <= saved - BEHIND + LAYERS


class Counting(HeldByHost):
    copies = 0

    def _copy_back(self, host: torch.Tensor) -> torch.Tensor:
        self.copies += 1
        return super()._copy_back(host)


# --- whatever backward asks for -----------------------------------------------------------------------


def in_order(x: torch.Tensor, hooks: Any) -> Any:
    with hooks:
        h = x
        for _ in range(LAYERS):
            h = cube(h)
    h.sum().backward()


def first_part_first(x: torch.Tensor, hooks: Any) -> Any:
    """The numbers that were saved last are asked for last."""
    with hooks:
        parts = [cube(cube(x * k).tanh()).sum() for k in range(LAYERS)]
    for part in parts:
        part.backward()


def every_other_part(x: torch.Tensor, hooks: Any) -> Any:
    with hooks:
        parts = [cube(cube(x * k).tanh()).sum() for k in range(LAYERS)]
    torch.stack(parts[::2]).sum().backward()


def up_and_down(x: torch.Tensor, hooks: Any, width: int = 12) -> Any:
    """An operation that asks for many tensors in the order in which it saved them."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *values: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*values)
            return torch.stack(values).square().sum(0)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(2 * value * grad for value in ctx.saved_tensors)

    with hooks:
        h = x
        for _ in range(4):
            h = Sum.apply(*(cube(h * k / width) for k in range(width)))
    h.sum().backward()


def some_are_never_asked_for(x: torch.Tensor, hooks: Any) -> Any:
    with hooks:
        h, parts = x, []
        for _ in range(LAYERS):
            h = h.tanh()
            parts.append(h.detach().requires_grad_())
            parts.append(cube(parts[-1]))
    torch.autograd.grad(parts[-1].sum(), parts[-2])
    h.sum().backward()


def retained(x: torch.Tensor, hooks: Any) -> Any:
    with hooks:
        h = x
        for _ in range(LAYERS):
            h = cube(h)
    for last in (False, False, True):
        h.sum().backward(retain_graph=not last)


def gradient_of_a_gradient(x: torch.Tensor, hooks: Any) -> Any:
    with hooks:
        h = x
        for _ in range(LAYERS):
            h = h.tanh() * h
        (grad,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        total = grad.square().sum()
    total.backward()


def several_forwards(x: torch.Tensor, hooks: Any) -> Any:
    losses = []
    for k in range(3):
        with hooks:
            h = x * k
            for _ in range(LAYERS):
                h = cube(h.tanh())
            losses.append(h.sum())
    losses[1].backward()
    (losses[2] * losses[0]).backward()


def abandoned(x: torch.Tensor, hooks: Any) -> Any:
    with hooks:
        h = x * 2
        for _ in range(LAYERS):
            h = cube(h.tanh())
        del h
        h = x
        for _ in range(LAYERS):
            h = cube(h)
    h.sum().backward()


def stopped(x: torch.Tensor, hooks: Any) -> Any:
    """By an error in the middle of backward; then all of it is done again."""

    def fail() -> None:
        raise RuntimeError("stop here")

    for layer in (fail, lambda: None):
        with hooks:
            h = x
            for number in range(LAYERS):
                h = cube(h, layer if number == LAYERS // 2 else lambda: None)
        with pytest.raises(RuntimeError, match="stop here") if layer is fail else contextlib.nullcontext():
            h.sum().backward()


def recomputed(x: torch.Tensor, hooks: Any, reentrant: bool = False) -> Any:
    """Inside of these hooks, and backward, too, so that a recomputation saves while others come back."""

    def block(h: torch.Tensor) -> torch.Tensor:
        return cube(cube(h).tanh()) * h

    with hooks:
        h = x
        for _ in range(LAYERS):
            h = checkpoint(block, h, use_reentrant=reentrant)
        h.sum().backward()


def recomputed_reentrant(x: torch.Tensor, hooks: Any) -> Any:
    recomputed(x, hooks, reentrant=True)


def looked_at(x: torch.Tensor, hooks: Any) -> Any:
    with hooks:
        h = x
        for _ in range(LAYERS):
            h = h.tanh()
    assert torch.equal(h.grad_fn._saved_result, h.detach())
    node = h.grad_fn
    for _ in range(AHEAD + 1):
        node = node.next_functions[0][0]
    assert node._saved_result.isfinite().all()
    assert hooks is NOTHING or not hooks._here
    h.sum().backward()


def edited(x: torch.Tensor, hooks: Any) -> Any:
    """A backward that writes into what it gets: the next one gets what was saved."""

    class Wild(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            result = 2 * x * grad
            if hooks is not NOTHING:
                x.zero_()
            return result

    with hooks:
        start = x * 1
        h = Wild.apply(start) + Wild.apply(start)
        for _ in range(AHEAD + 1):
            h = h.tanh()
        h = h.sum()
    h.backward()


NOTHING = contextlib.nullcontext()
WAYS = [
    *(in_order, first_part_first, every_other_part, up_and_down, some_are_never_asked_for, retained),
    *(gradient_of_a_gradient, several_forwards, abandoned, stopped, recomputed, recomputed_reentrant),
    *(looked_at, edited),
]


def gradient(way: Any, hooks: Any) -> torch.Tensor:
    x = leaf()
    way(x, hooks)
    return x.grad


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_late_copies_change_no_bit(way):
    with late_streams():
        expected = gradient(way, NOTHING)
        assert expected.isfinite().all()
        assert torch.equal(expected, gradient(way, late_hooks()))


def on_the_device(mode: TwoDevices) -> int:
    return sum(storage.nbytes() for storage, place in mode.places.items() if place == DEVICE.index)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_nothing_stays_on_the_device(way):
    with two_devices() as mode:
        gradient(way, NOTHING)
        hooks, before = HeldByHost(DEVICE, HOST, smallest=0), on_the_device(mode)
        gradient(way, hooks)
        assert not hooks._here
        assert on_the_device(mode) == before


def test_nothing_stays_of_a_graph_that_is_retained():
    with two_devices() as mode:
        hooks, x = HeldByHost(DEVICE, HOST, smallest=0), leaf()
        with hooks:
            h = x
            for _ in range(LAYERS):
                h = cube(h)
        x.grad = torch.zeros_like(x)
        loss = h.sum()
        middle = on_the_device(mode) - BEHIND * x.nbytes
        for _ in range(2):
            loss.backward(retain_graph=True)
            assert on_the_device(mode) <= middle + 2 * x.nbytes


# --- with the engine -----------------------------------------------------------------------------------


@contextlib.contextmanager
def late_case(graph: str, **options: Any) -> Iterator[tuple[Any, LateStreams]]:
    case = GRAPHS[graph]
    with late_streams() as mode:
        hooks = late_hooks()

        def step(*args: Any) -> Any:
            with hooks:
                return case.step(*args)

        yield dataclasses.replace(case, step=step, options={**case.options, "device": DEVICE, **options}), mode


def late(graphs: list[str], stage: int, **options: Any) -> None:
    for graph in graphs:
        usual = train(GRAPHS[graph], Sharded(stage))
        with late_case(graph, **options) as (case, mode):
            compare(usual, train(case, Sharded(stage)), tolerance=0)
            assert mode.crossings, graph


SOME = ["plain", "checkpoint_of_a_block_used_twice_nonreentrant", "tied_embedding_and_head"]


@pytest.mark.sampled
@pytest.mark.parametrize("offload", [None, "all"])
def test_late_copies_change_no_bit_of_a_sharded_model(offload):
    late(SOME, 3, offload=offload)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_nor_on_two_ranks(run2, stage):
    run2(late, SOME, stage)
