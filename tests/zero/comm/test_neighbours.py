"""Promise: ranks on one machine read each other's memory where the system allows it, and messages move as gloo's do:
none is mixed up, none is said to be sent before it was read, and who waits for a rank that is gone is told."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import gc
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardproof
from distributed.harness import Sharded, compare, train
from distributed.pool import Pool, Pools, RemoteError
from shardproof.zero.comm import collectives, neighbours
from shardproof.zero.comm.collectives import Collectives
from shardproof.zero.comm.connections import NeighbourGone
from zero.graphs import CASES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux lets a process read another's memory")


@functools.cache
def found() -> neighbours.Neighbours:
    near = neighbours.find_neighbours(dist.group.WORLD)
    assert near is not None
    return near


def are_found() -> bool:
    near = neighbours.find_neighbours(dist.group.WORLD)
    if near is not None:
        near.close()
    return near is not None


@pytest.fixture(scope="module", autouse=True)
def _allowed(pools: Pools) -> None:
    if not all(pools.run(2, are_found)):
        pytest.skip("this system lets no process read another's memory")


def messages() -> None:
    near, rank, size = found(), dist.get_rank(), dist.get_world_size()
    others = [r for r in range(size) if r != rank]
    assert near.complete
    assert all(r in near for r in others)
    assert rank not in near
    numels = [0, 1, 1000, 100_003, 3_000_000]
    for late in range(size):
        if rank == late:
            time.sleep(0.05)  # what it awaits is there, and what it sends is awaited
        sends, receives = [], []
        for tag, numel in enumerate(numels):
            for r in others:
                sends.append(near.send([torch.full((numel,), 100.0 * rank + r)], r, tag))
        for tag, numel in reversed(list(enumerate(numels))):
            for r in others:
                into = torch.zeros(numel)
                receives.append((near.recv([into], r, tag), into, 100.0 * r + rank))
        for message, into, value in receives:
            message.wait()
            assert bool((into == value).all())
        for message in sends:
            message.wait()


def test_messages_of_any_size_and_order_arrive(run2, run4):
    run2(messages)
    run4(messages)


def one_after_the_other() -> list[float]:
    near, rank = found(), dist.get_rank()
    if rank == 0:
        sent = [near.send([torch.tensor([float(k)])], 1, 7) for k in range(20)]
        for message in sent:
            message.wait()
        return []
    got = [torch.zeros(1) for _ in range(20)]
    early = [near.recv([into], 0, 7) for into in got[:10]]
    time.sleep(0.05)
    for message in early + [near.recv([into], 0, 7) for into in got[10:]]:
        message.wait()
    return [float(into) for into in got]


def test_messages_of_one_tag_keep_their_order(run2):
    assert run2(one_after_the_other)[1] == list(range(20))


def thousands() -> list[float]:
    near, other = found(), 1 - dist.get_rank()
    into = [torch.zeros(4096) for _ in range(3000)]
    messages = [near.recv([each], other, 1) for each in into]
    dist.barrier()
    messages += [near.send([torch.full((4096,), float(k))], other, 1) for k in range(3000)]
    for message in messages:
        message.wait()
    return [float(each[-1]) for each in into]


def test_more_messages_than_sockets_hold(run2):
    """Both ranks read what comes and say so, while both send: whoever waits for room in a socket reads nothing."""
    assert run2(thousands, timeout=30) == [list(range(3000))] * 2


def sends_to_a_late_rank() -> bool:
    """Whether the sender's wait ended before the other rank had a buffer."""
    near, rank = found(), dist.get_rank()
    if rank == 1:
        time.sleep(0.3)
        into = torch.zeros(10)
        near.recv([into], 0, 3).wait()
        assert bool((into == 1).all())
        return False
    tensor, ended = torch.ones(10), threading.Event()
    message = near.send([tensor], 1, 3)
    threading.Thread(target=lambda: (message.wait(), ended.set())).start()
    early = ended.wait(0.15)
    message.wait()
    tensor.zero_()  # nobody looks at it any more
    return early


def test_a_wait_of_the_sender_ends_when_its_data_was_read(run2):
    assert run2(sends_to_a_late_rank) == [False, False]


def of_two_sizes() -> str:
    near, rank = found(), dist.get_rank()
    if rank == 0:
        near.send([torch.zeros(10)], 1, 5)
        return ""
    try:
        near.recv([torch.zeros(9)], 0, 5).wait()
    except NeighbourGone as problem:
        return str(problem)
    return "nothing"


def test_a_message_of_another_size_is_refused(run2):
    assert "it sends 40 bytes, 36 are awaited" in run2(of_two_sizes)[1]


def dies(while_others: str) -> None:
    near, rank = neighbours.find_neighbours(dist.group.WORLD), dist.get_rank()
    assert near is not None
    if rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    message = near.send([torch.ones(4)], 1, 0) if while_others == "send" else near.recv([torch.ones(4)], 1, 0)
    start = time.monotonic()
    for _ in range(2):  # the second never begins
        with pytest.raises(NeighbourGone, match="rank 1"):
            message.wait()
        assert time.monotonic() - start < 5
        message = near.recv([torch.ones(4)], 1, 0)
    raise RuntimeError("told")


@pytest.mark.parametrize("what", ["send", "recv"])
def test_who_waits_for_a_rank_that_is_killed_is_told_at_once(what, tmp_path: Path):
    pool = Pool(2)
    try:
        with pytest.raises(RemoteError, match="told"):
            pool.run(dies, what)
    finally:
        pool.close()


def dies_before_gloo_knows() -> None:
    model = shardproof.shard(torch.nn.Linear(8, 8), 3)
    shardproof.barrier(model)
    if dist.get_rank() == 1:
        if os.fork() == 0:  # holds the connections of gloo
            time.sleep(10)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        model.weight.flat.engine.comm.exchange(torch.zeros(2), [1, 1], [1, 1])
    finally:
        assert time.monotonic() - start < 8


@pytest.mark.slow
def test_a_child_of_a_rank_that_is_killed_hides_nothing():
    """The connection that tells of it says who, too."""
    pool = Pool(2)
    try:
        with pytest.raises(RemoteError, match="Rank 1 is gone"):
            pool.run(dies_before_gloo_knows)
    finally:
        pool.close()


def fails_in_a_child() -> str:
    model = shardproof.shard(torch.nn.Linear(8, 8), 3)
    shardproof.barrier(model)
    store = model.weight.flat.engine.streams.watchdog.store
    if dist.get_rank() == 1:
        child = os.fork()
        if child == 0:
            sys.excepthook(ValueError, ValueError("the child's own"), None)
            atexit._run_exitfuncs()
            os._exit(0)
        os.waitpid(child, 0)
    dist.barrier()
    return "".join(key for key in ("verdict", "left/1") if store.check([key]))


def test_a_child_that_fails_is_no_rank(run2):
    assert run2(fails_in_a_child) == ["", ""]


def closed_by_a_child() -> float:
    near, rank = found(), dist.get_rank()
    child = os.fork()
    if child == 0:
        near.close()
        os._exit(0)
    os.waitpid(child, 0)
    dist.barrier()
    into = torch.zeros(1)
    messages = [near.recv([into], 1 - rank, 0), near.send([torch.ones(1)], 1 - rank, 0)]
    for message in messages:
        message.wait()
    return float(into)


def test_a_child_closes_its_own_connections_only(run2):
    assert run2(closed_by_a_child) == [1.0, 1.0]


def close_while_another_waits() -> str:
    near, rank = neighbours.find_neighbours(dist.group.WORLD), dist.get_rank()
    assert near is not None
    message = near.recv([torch.ones(4)], 1 - rank, 0)
    if rank == 0:
        threading.Timer(0.1, near.close).start()
    try:
        message.wait()
    except NeighbourGone as problem:
        return str(problem)
    return "nothing"


def test_closing_ends_every_wait_on_both_sides(run2):
    assert all("closed" in told for told in run2(close_while_another_waits))


class Failing:
    """A connection on which sending fails, before or after the note has gone."""

    def __init__(self, connection: socket.socket, problem: BaseException, sends: bool) -> None:
        self.connection, self.problem, self.sends = connection, problem, sends

    def send(self, note: bytes, flags: int) -> int:
        if self.sends:
            self.connection.send(note, flags)
        raise self.problem

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)


def fails_to_say(interrupted: bool) -> str:
    """Rank 0 does not know whether its note has gone. What rank 1 is told of two waits."""
    near, rank = neighbours.find_neighbours(dist.group.WORLD), dist.get_rank()
    assert near is not None
    if rank == 0:
        other = near._ranks[1]
        problem: BaseException = KeyboardInterrupt() if interrupted else OSError(errno.ENOBUFS, "no buffers")
        other.connection = Failing(other.connection, problem, sends=interrupted)  # type: ignore[assignment]
        try:
            near.send([torch.ones(4)], 1, 0).wait()
        except (KeyboardInterrupt, NeighbourGone) as told:
            return type(told).__name__
        return "sent"
    into = torch.zeros(4)
    for _ in range(2):
        message = near.recv([into], 0, 0)
        with contextlib.suppress(NeighbourGone):
            message.wait()
    return type(message.problem).__name__


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_note_that_fails_is_not_lost_nor_said_twice(run2, interrupted):
    ours = "KeyboardInterrupt" if interrupted else "NeighbourGone"
    assert run2(fails_to_say, interrupted) == [ours, "NeighbourGone"]


def meets_a_mistake() -> str:
    """The thread of rank 0 meets an exception that nobody has thought of."""
    near, rank = neighbours.find_neighbours(dist.group.WORLD), dist.get_rank()
    assert near is not None
    if rank == 0:
        near._hear = lambda neighbour, note: {}[note]  # type: ignore[method-assign]
    dist.barrier()
    message = near.recv([torch.zeros(4)], 1, 0) if rank == 0 else near.send([torch.ones(4)], 0, 0)
    try:
        message.wait()
    except NeighbourGone:
        return "told"
    return "nothing"


def test_nobody_waits_for_a_thread_that_has_met_a_mistake(run2):
    assert run2(meets_a_mistake) == ["told", "told"]


# --- where it is not allowed ------------------------------------------------------------------------


def groups_without(how: str) -> tuple[bool, bool]:
    """Of all ranks, the last of which takes no part: whether there are neighbours, and whether all are."""
    rank, size = dist.get_rank(), dist.get_world_size()
    read, sockets, environment = neighbours._read, socket.socket, dict(os.environ)

    def refuse(*args: Any) -> None:
        raise OSError(errno.EPERM, "refused")

    if rank == size - 1:
        if how == "told not to":
            os.environ[neighbours.VARIABLE] = "0"
        elif how == "may not read":
            neighbours._read = refuse
        else:
            socket.socket = refuse  # type: ignore[assignment, misc]
    try:
        near = neighbours.find_neighbours(dist.group.WORLD)
    finally:
        neighbours._read, socket.socket = read, sockets  # type: ignore[misc]
        os.environ.clear()
        os.environ.update(environment)
    if near is not None:
        near.close()
    return near is not None, near is not None and near.complete


@pytest.mark.parametrize("how", ["told not to", "may not read", "has no such sockets"])
def test_a_rank_that_may_not_is_no_neighbour_of_anybody(run2, run4, how):
    assert run2(groups_without, how) == [(False, False)] * 2
    assert run4(groups_without, how) == [(True, False)] * 3 + [(False, False)]


def mixed_training(stage: int) -> None:
    """Where only some ranks are neighbours, and where none are, against all."""
    graphs = ["plain", "tied_embedding_and_head", "checkpoint_of_a_block_used_twice_nonreentrant"]
    expected = [train(CASES[graph], Sharded(stage)) for graph in graphs]
    everyone = str(dist.group.WORLD.group_name)  # other tests on these ranks may have made groups of some
    group, near = collectives._neighbours[everyone]
    assert near is not None
    assert near.complete
    for others in ({0, 1}, set()):  # ranks 0 and 1 of four, then nobody
        few = Partial(near, others if dist.get_rank() in others else set())
        collectives._neighbours[everyone] = group, few
        try:
            for graph, same in zip(graphs, expected, strict=True):
                compare(same, train(CASES[graph], Sharded(stage)), tolerance=1e-6)
        finally:
            collectives._neighbours[everyone] = group, near


class Partial:
    """Some of the neighbours."""

    complete = False

    def __init__(self, near: neighbours.Neighbours, ranks: set[int]) -> None:
        self.send, self.recv, self.ranks = near.send, near.recv, ranks

    def __contains__(self, rank: int) -> bool:
        return rank in self.ranks


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_training_is_the_same_whichever_way_messages_go(run4, stage):
    run4(mixed_training, stage)


# --- sums over all ranks ------------------------------------------------------------------------------


def sums() -> None:
    comm = Collectives(None, torch.device("cpu"))
    assert comm.neighbours is not None
    assert comm.neighbours.complete
    rank, size = comm.rank, comm.size
    generator = torch.Generator().manual_seed(3)
    for numel in (1, 2, 16, 1001, 500_000):
        several = [torch.randn(size, numel, generator=generator) for _ in range(4)]
        if rank == 0:
            time.sleep(0.02)
        pendings = [comm.all_reduce(values[rank].clone(), tag=6) for values in several]  # all of one tag, at once
        for pending, values in zip(pendings, several, strict=True):
            expected = values[0].clone()
            for r in range(1, size):
                expected += values[r]
            assert torch.equal(pending.wait(), expected)  # bit for bit: added in the order of the ranks


def sums_in_pieces() -> None:
    with mock.patch.object(collectives, "_PIECE", 1 << 10):
        sums()


@pytest.mark.slow
def test_sums_that_are_under_way_together_are_not_mixed_up(run2, run4):
    for run in (run2, run4):
        run(sums)
        run(sums_in_pieces)


def groups_that_end(folder: str) -> int:
    """How many threads of neighbours are left of groups that have ended."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for k in range(3):
        model = shardproof.shard(torch.nn.Linear(64, 64), 3)
        model(torch.ones(2, 64)).sum().backward()
        shardproof.barrier(model)
        dist.barrier()
        del model
        dist.destroy_process_group()
        gc.collect()
        for _ in range(50):
            left = sum(thread.name == "shardproof-neighbours" for thread in threading.enumerate())
            if left == 0:
                break
            time.sleep(0.1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/{k}", rank=rank, world_size=size)
    return left


def test_a_group_that_ends_leaves_no_thread(tmp_path: Path):
    pool = Pool(2)
    try:
        assert pool.run(groups_that_end, str(tmp_path)) == [0, 0]
    finally:
        pool.close()
