"""Promise: ranks that agree in a tree, as many of them do, come to the same as those that tell each other."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardproof
from distributed.pool import Pools
from shardproof.zero.comm import tree


@pytest.fixture(scope="module")
def in_tree() -> Iterator[Callable[..., list[Any]]]:
    """`in_tree(world, module, function, *args)` on ranks that take themselves for many."""
    pools = Pools()  # of its own: the streams of a group are in a tree or not as long as it lives
    yield lambda world, *what: pools.run(world, call, *what)
    pools.close()


def call(module: str, function: str, *args: Any) -> Any:
    tree.MANY = 1
    return getattr(importlib.import_module(f"zero.{module}"), function)(*args)


def greatest() -> tuple[list[int], int]:
    values = torch.tensor([dist.get_rank(), -dist.get_rank(), 5])
    made = tree.Tree(lambda: dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    return made.largest(values).tolist(), len(made.children) + (made.parent is not None)


@pytest.mark.parametrize("world", [2, 3, pytest.param(7, marks=pytest.mark.slow)])
def test_the_greatest_is_known_everywhere(in_tree, world):
    found = in_tree(world, "comm.test_tree", "greatest")
    assert [values for values, _ in found] == [[world - 1, 0, 5]] * world
    assert max(neighbours for _, neighbours in found) <= 3


def messages() -> int:
    model = shardproof.shard(torch.nn.Linear(4, 4), 3)
    comm = model.__dict__["_shardproof"].comm
    assert comm.tree is not None
    sent, send = [], comm.words.send
    comm.words.send = lambda word: (sent.append(word), send(word))
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        shardproof.barrier(model)
    return len(sent)


def test_no_word_goes_from_each_to_each(in_tree):
    assert in_tree(3, "comm.test_tree", "messages") == [0, 0, 0]


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_on_different_paths_equal_one_process(in_tree, stage):
    in_tree(2, "test_dynamic", "check_any_path", stage, "nonreentrant", "auto")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_so_do_four_and_those_with_plans_that_are_left(in_tree, stage):
    for how in ("none", "nonreentrant", "reentrant"):
        in_tree(4, "test_dynamic", "check_any_path", stage, how, "auto")
    in_tree(2, "test_dynamic", "check_two_models", stage)
    in_tree(4, "test_hybrid", "any_path", stage)
    from zero.test_plans import UNUSUAL

    for name in UNUSUAL:
        in_tree(2, "test_plans", "check", stage, name, stage != 1, False)
        in_tree(2, "test_plans", "check", stage, name, True, True)
    for where in ("before the step", "after the step", "no batch", "uneven after a look"):
        in_tree(2, "test_plans", "around", where, stage, True, True)
    for accelerator in (False, True):
        in_tree(2, "test_plans", "goes_on_one_rank", stage, accelerator)
