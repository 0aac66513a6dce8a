"""The pool runs functions on ranks and says clearly what went wrong."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist

from distributed.pool import Pool, PoolTimeout, RemoteError


def where() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def add_up(value: float) -> float:
    total = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return total.item()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the reason")
    dist.barrier()


def hang_on_rank_0() -> None:
    if dist.get_rank() == 0:
        threading.Event().wait()


def post_one_collective_more_on_rank_0() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(3))


def die() -> None:
    os._exit(7)


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_runs_the_function_in_one_group(run, world):
    assert [answer[:2] for answer in run(world, where)] == [(rank, world) for rank in range(world)]
    assert run(world, add_up, 0.5) == [0.5 * world * (world + 1) / 2] * world


def test_processes_are_shared_between_calls(run2):
    assert run2(where) == run2(where)


def test_a_call_that_is_ended_from_outside_answers_no_later_one(monkeypatch):
    """As by the limit of a test, or Ctrl-C."""
    pool = Pool(1)
    try:
        pool.run(where)

        def end(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(pool, "_collect", end)
            pool.run(add_up, 0.5)
        assert pool.run(add_up, 2.0) == [2.0]
    finally:
        pool.close()


def test_a_function_without_import_path_is_refused(run2):
    with pytest.raises(TypeError, match="module-level"):
        run2(lambda: None)


@pytest.fixture
def own_pool():
    """Not the shared one: these tests break it."""
    pool = Pool(2)
    yield pool
    pool.close()


def test_failures_name_rank_and_reason_and_the_pool_recovers(own_pool, monkeypatch):
    monkeypatch.setattr("distributed.pool.GRACE", 0.5)
    with pytest.raises(RemoteError, match=r"(?s)rank 1 of 2 raised.*ValueError: the reason.*rank 0 of 2 was still"):
        own_pool.run(fail_on_rank_1)
    own_pool.run(where)  # so that new ranks are in the function when its time is over
    with pytest.raises(PoolTimeout, match=r"(?s)rank 0 of 2 was still here.*hang_on_rank_0"):
        own_pool.run(hang_on_rank_0, timeout=1.0)
    assert own_pool.run(add_up, 1.0) == [3.0, 3.0]


def test_ranks_that_disagree_about_collectives_are_caught_in_their_own_test(own_pool, monkeypatch):
    monkeypatch.setattr("distributed.pool.GRACE", 0.5)
    with pytest.raises((PoolTimeout, RemoteError)):
        own_pool.run(post_one_collective_more_on_rank_0, timeout=2.0)


def test_a_dead_rank_is_reported(own_pool):
    with pytest.raises(RemoteError, match="exit code 7"):
        own_pool.run(die)
