"""Promise: `shard` joins the ranks that any launcher has started, and never trains alone where there are others."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys

import pytest
import torch

import shardproof
from shardproof.errors import EngineError
from shardproof.zero.comm.groups import once
from zero.models import Net

SCRIPT = """
import torch, torch.distributed as dist, shardproof
torch.manual_seed(int(__import__("os").environ["RANK"]))
model = shardproof.shard(torch.nn.Linear(4, 4), 3)
print(dist.get_world_size(), shardproof.full_state_dict(model, rank0_only=False)["weight"].sum().item())
for group in (dist.group.WORLD, model.weight.flat.engine.comm._data_group):
    print("may take", group._get_backend(torch.device("cpu")).options._timeout)
"""


def test_ranks_that_only_have_the_variables(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT], env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        first, second = (rank.communicate(timeout=120)[0] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert first.startswith("2 ")
    assert first == second  # all start from the values of rank 0
    assert first.count("may take 6:00:00") == 2  # who evaluates for an hour is in order


def test_variables_that_are_not_enough_are_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(EngineError, match=r"WORLD_SIZE=2 .* MASTER_ADDR, MASTER_PORT is not set"):
        shardproof.shard(Net(), 3)


def test_what_belonged_to_a_group_that_has_ended_is_not_taken_for_another_ones():
    """A new group may get the name of the old one, and its address."""

    class Group:
        group_name = "0"

    known: dict = {}
    numbers = itertools.count()
    found = []
    for _ in range(50):
        group = Group()
        found.append(once(group, known, lambda: next(numbers)))
        assert once(group, known, lambda: next(numbers)) == found[-1]
        del group
    assert found == list(range(50))


def limits() -> set[str]:
    from shardproof.integrations.prepared import hybrid_mesh
    from shardproof.parallel.sequence import SequenceParallel
    from shardproof.train.stop import StopAfterStep

    mesh = hybrid_mesh(2, torch.device("cpu"))
    assert mesh is not None
    groups = [*mesh.get_all_groups(), SequenceParallel(2, "cpu").group, StopAfterStep()._group]
    assert len(groups) == 4
    return {str(group._get_backend(torch.device("cpu")).options._timeout) for group in groups}


@pytest.mark.slow
def test_every_group_of_ours_may_take_long(run4):
    assert run4(limits) == [{"6:00:00"}] * 4
