"""Where the ranks of a process group find each other when a torchrun of the user's own has started them.

[Note: ranks that are started again] The agent of such a torchrun keeps one store for all ranks that it ever starts,
and those that are started again after a loss find in it what the lost ones have written: gloo then calls their
addresses, for ever or until it is refused. No variable tells one start from the next: with agents on several machines
the count of restarts differs by machine, and the port stays. So the ranks agree on a part of the store that nobody has
used: rank 0 makes a name for it, and gives it to who asks with a token of its own. Tokens of the dead are answered,
too, and nobody reads that.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # the variable by which an agent says that ranks share its store

_LONGEST_PAUSE = 0.1  # seconds


def store_of_attempt(limit: timedelta) -> tuple[dist.Store, int, int]:
    """The part of the agent's store for these ranks, the rank of this process and their number. Collective.

    Raises:
        DistError: a rank is not there within `limit`.
    """
    store, rank, size = next(rendezvous("env://", timeout=limit))
    store.set_timeout(limit)
    return dist.PrefixStore(agreed_prefix(store, rank, size, limit), store), rank, size


def agreed_prefix(store: dist.Store, rank: int, size: int, limit: timedelta) -> str:
    """A name that all of these ranks have, and no others before them in this store. Collective.

    Raises:
        DistError: a rank is not there within `limit`.
    """
    if rank:
        token = secrets.token_hex(8)
        store.set(f"shardproof/asks/{rank}", token)
        answer = f"shardproof/answer/{token}"
        store.wait([answer], limit)
        prefix = store.get(answer).decode()
        store.set(f"{prefix}/heard/{rank}", "")
        return prefix
    prefix, end, pause = f"shardproof/{secrets.token_hex(8)}", time.monotonic() + limit.total_seconds(), 0.001
    missing = list(range(1, size))
    while True:
        for other in missing:
            if store.check([f"shardproof/asks/{other}"]):
                store.set(f"shardproof/answer/{store.get(f'shardproof/asks/{other}').decode()}", prefix)
        missing = [other for other in missing if not store.check([f"{prefix}/heard/{other}"])]
        if not missing:
            return prefix
        if time.monotonic() > end:
            raise dist.DistStoreError(f"Rank(s) {', '.join(map(str, missing))} did not come within {limit}.")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
