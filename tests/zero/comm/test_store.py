"""Promise: ranks that are started again agree on a part of the store in which those before them have left nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardproof.zero.comm.store import agreed_prefix

LIMIT = timedelta(seconds=20)


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=LIMIT)


def agreed(store: dist.TCPStore, size: int) -> set[str]:
    """What each of so many ranks has found."""
    with ThreadPoolExecutor(size) as ranks:
        found = [ranks.submit(agreed_prefix, store.clone(), rank, size, LIMIT) for rank in reversed(range(size))]
        return {each.result() for each in found}


def test_every_start_has_a_name_of_its_own(store):
    """Also with other ranks than before."""
    names = [agreed(store, size) for size in (3, 3, 2, 1, 4)]
    assert [len(name) for name in names] == [1] * 5
    assert len(set.union(*names)) == 5


def test_one_that_asked_and_died_is_not_taken_for_there(store):
    store.set("shardproof/asks/1", "of the dead")
    with pytest.raises(dist.DistError, match=r"Rank\(s\) 1 did not come"):
        agreed_prefix(store, 0, 2, timedelta(seconds=0.3))
    with pytest.raises(dist.DistError):
        agreed_prefix(store.clone(), 1, 2, timedelta(seconds=0.3))
    assert len(agreed(store, 2)) == 1
