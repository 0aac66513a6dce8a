"""The watchdog: ranks that wait for each other forever end soon, with one message that says where each is.

[Note: what is noticed, and how]
A rank whose process ends closes its connections, so ranks that wait for it get an error immediately; the reason for
its end (an exception, the end of its program) it has left in the store of the process group before. A rank that is
alive but never arrives (it sits in a collective of user code) is found by a thread on every rank: while any rank
waits for long, each thread publishes what its main thread is doing. When all ranks are blocked, at least one of them
outside the engine, nothing can move any more. A rank that computes, loads or saves is never blamed, however long it
takes: ranks that wait for it are told where it is. If all ranks wait in the engine itself, or in collectives of user
code, data is in flight; if that takes half an hour, they end too.

[Note: blocked at one moment]
A rank's last report may be out of date: meanwhile it may have moved on, and a rank that waited for it may be in the
next collective. On a busy machine a thread reports nothing for seconds. So there is a verdict only if each rank was
found in the same wait twice: in a report from before some moment, and in one that was begun after it. Then all ranks
were blocked at that moment. Waits are told apart by when they began; calls of collectives by their frame and by
whether the engine has waited in between, as the frame of the next call may get the address of the last one.

[Note: waking a blocked rank]
A thread that waits inside gloo receives no Python exception. But when a receive times out, gloo closes the connections
of its group, and everything that waits there ends with an error.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from shardproof.errors import DesyncError
from shardproof.zero.comm.connections import address_in, fell_silent, is_closed_connection, tcp_keepalive
from shardproof.zero.ranks.frames import collective_of_the_user, place_in_user_code

if TYPE_CHECKING:
    from shardproof.zero.comm.collectives import Collectives

log = logging.getLogger("shardproof.zero")

# For ranks that save or evaluate under `if rank == 0`, while the others end.
_ALONE = (
    " A rank that uses a model alone still needs the others' shards: end with shardproof.barrier(model) on all ranks, "
    "which waits and lends them, or save with shardproof.save or shardproof.full_state_dict on all ranks."
)
# For a rank that needs a part of a model that was sharded, or copied, on some ranks only.
NOT_HERE = (
    "Another rank needs a part of a model that this rank does not have: a model was sharded, or a sharded one copied "
    "(copy.deepcopy), on some ranks only. Do it on all ranks. For a copy on one rank, call "
    "shardproof.full_state_dict(model) on all ranks, and load the result on that one into a model that is not sharded."
)
STILL = 180  # times the patience: half an hour in which all ranks do nothing but wait for data


class Wait(NamedTuple):
    """A wait of the engine: for which rank (negative: any), for what, since when (monotonic seconds), in which
    phase."""

    rank: int
    word: int
    since: float
    backward: bool


class Said(NamedTuple):
    """A rank's report: what its main thread does, for how many seconds, in words, since when by its own clock; and how
    many reports it has made."""

    kind: str
    age: float
    text: str
    since: float
    times: int


def _own_exception(error: BaseException | None) -> BaseException | None:
    """The exception being handled when ranks parted: only this rank had it, so only this rank shows it."""
    while error is not None and (isinstance(error, DesyncError) or is_closed_connection(error)):
        error = error.__cause__ or error.__context__
    return error


class Watchdog:
    """Watches one process group from one rank.

    Args:
        describe: turns a word of the streams into "gather 'layers.3'" and the module that is running, if any.

    Attributes:
        patience: seconds after which ranks that wait for each other forever are ended.
        waiting: what this rank waits for, set around each wait; `waits`: number of waits so far.
    """

    def __init__(self, comm: Collectives, describe: Callable[[int], tuple[str, str]]) -> None:
        self.comm, self.describe, self.patience = comm, describe, 10.0
        self.waiting: Wait | None = None
        self.waits = 0
        self.store = dist.PrefixStore(f"shardproof/{comm.group_name}", _own_connection())
        self._main, self._process = threading.get_ident(), os.getpid()
        self._collective: tuple[tuple[int, int], float] = (0, 0), 0.0
        self._stop = threading.Event()
        self._signal = b""
        self._heard = self._told_at = self._awake = 0.0
        self._ticked = time.monotonic()
        self._seen: dict[int, tuple[str, float, int]] = {}
        self._blocked: dict[int, Said] = {}  # when all ranks were first found so
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_exception
        self._thread = threading.Thread(
            target=_watch, args=(weakref.ref(self),), name="shardproof-watchdog", daemon=True
        )
        self._thread.start()
        atexit.register(_leave, weakref.ref(self))

    # --- errors ---------------------------------------------------------------------------------

    def places(self, number: int) -> list[str]:
        """Where each rank is that comes to the same verdict, now or soon; `number` identifies it."""
        self.store.set(f"apart/{number}/{self.comm.rank}", f", at {place_in_user_code(self._main_frame())}")
        end = time.monotonic() + self.patience
        found: list[str] = []
        for rank in range(self.comm.size):
            while not (place := self._get(f"apart/{number}/{rank}")) and time.monotonic() < end:
                time.sleep(0.02)
            found.append(place.decode())
        return found

    def lost(self, problem: Exception, rank: int = -1) -> DesyncError:
        """The error for a wait of this rank, for `rank` or (negative) for all, that ended because a connection was
        closed; `problem` may tell which."""
        ranks = [r for r in range(self.comm.size) if r != self.comm.rank]
        rank, silent, address = getattr(problem, "rank", rank), fell_silent(str(problem)), address_in(str(problem))
        over = [] if silent else [r for r in ranks if self._get(f"left/{r}")]
        there = [r for r in ranks if address in self.comm.hosts[r].addresses] if silent else []
        lost = over or there or self._lost() or [r for r in ranks if r == rank]
        who = self._names(lost) if lost else "Another rank"
        if over:
            reason = f"{who} has reached the end of its program."
        elif silent:
            reason = f"{who} does not answer any more: its machine or the network is down."
        else:
            reason = f"{who} is gone: killed, crashed, or out of memory; its own output may say more."
        verdict = self.agree_on_verdict(reason)
        wait = self.waiting
        if wait is None or "\n" in verdict:  # a verdict of several lines covers all ranks
            return DesyncError(verdict)
        mine = self._names([self.comm.rank])
        return DesyncError(
            f"{verdict}\n{mine} {self._text(wait, self._main_frame(), 'waited')}.{_ALONE if over else ''}"
        )

    def _lost(self) -> list[int]:
        """Ranks whose connection is closed, except those that have closed theirs because they are looking, too."""
        self.leave_word("looks")
        return [r for r in self.comm.lost_ranks() if not self._get(f"looks/{r}")]

    def leave_word(self, word: str) -> None:
        """Leave a word about this rank for the others."""
        with contextlib.suppress(Exception):  # the process that holds the store is gone as well
            self.store.set(f"{word}/{self.comm.rank}", "1")

    def _main_frame(self) -> FrameType | None:
        """The frame of the main thread, from any thread: with an accelerator, backward runs in one of torch's
        threads."""
        return sys._current_frames().get(self._main)

    def _names(self, ranks: list[int]) -> str:
        """`Rank 2, 3`, with the machine if there are several: `Rank 2, 3 on node-b`."""
        hosts = [host.name for host in self.comm.hosts]
        if len(set(hosts)) == 1:
            return f"Rank {', '.join(map(str, ranks))}"
        at = {host: [str(r) for r in ranks if hosts[r] == host] for host in dict.fromkeys(hosts[r] for r in ranks)}
        return " and ".join(f"{'r' if n else 'R'}ank {', '.join(at[host])} on {host}" for n, host in enumerate(at))

    def agree_on_verdict(self, reason: str) -> str:
        """The first verdict of any rank counts."""
        try:
            return self.store.compare_set("verdict", "", reason).decode()
        except Exception:  # the process that holds the store is gone as well
            return reason

    def _get(self, key: str) -> bytes:
        try:
            return self.store.get(key) if self.store.check([key]) else b""
        except Exception:
            return b""

    def _on_exception(self, kind: type[BaseException], error: BaseException, tb: Any) -> None:
        """The program of this rank ends: leave word for the others, and show only what no other rank shows."""
        if os.getpid() != self._process:  # a forked child is not a rank, and its connections are the rank's
            self._previous_hook(kind, error, tb)
            return
        known = self._get("verdict").decode()
        if isinstance(error, DesyncError):
            if (own := _own_exception(error)) is not None:
                self._previous_hook(type(own), own, own.__traceback__)
            if self._rank_that_prints() == self.comm.rank:
                print(f"shardproof: {error}", file=sys.stderr, flush=True)
            return
        ours = self.agree_on_verdict(self._obituary(kind, error, tb))
        if known and ours == known and is_closed_connection(error):
            first = f"rank {self.comm.rank} ends too. {known.splitlines()[0]}"
            told = known if self._rank_that_prints() == self.comm.rank else first
            print(f"shardproof: {told}", file=sys.stderr, flush=True)
            return
        self._previous_hook(kind, error, tb)
        self.comm.close_connections()

    def _rank_that_prints(self) -> int:
        try:
            return int(self.store.compare_set("teller", "", str(self.comm.rank)))
        except Exception:
            return self.comm.rank

    def _obituary(self, kind: type[BaseException], error: BaseException, tb: Any) -> str:
        last = [frame for frame, _ in traceback.walk_tb(tb)]
        first_line = (str(error).splitlines() or [""])[0]
        where = place_in_user_code(last[-1] if last else None)
        who = self._names([self.comm.rank])
        return f"{who} stopped with {kind.__name__}: {first_line} at {where}. Its own traceback says more."

    # --- the thread -----------------------------------------------------------------------------

    def tick(self) -> None:
        """What the thread does every tenth of the patience."""
        now = time.monotonic()
        if now - self._ticked > 5 * max(self.patience, 1.0):  # this process was stopped, and waits anew
            self._awake = now
        self._ticked = now
        if self._get("verdict"):
            self._end_if_blocked(now)
            return
        waits = self.waiting is not None and now - self.waiting.since > 0.2 * self.patience
        if waits or self._sits_in_a_collective(now):
            self.store.set("stuck", f"{self.comm.rank} {now}")
        signal = self._get("stuck")
        if signal != self._signal:
            self._signal, self._heard = signal, now
        if signal and now - self._heard < 0.5 * self.patience:
            kind, since, text = self._state(now)
            self.store.set(f"at/{self.comm.rank}", json.dumps([kind, now - since, text, since, now]))
            if self.comm.rank < 2:
                self._evaluate(now)

    def _sits_in_a_collective(self, now: float) -> bool:
        """Whether it does for long, which all ranks may do: nobody waits in the engine then."""
        kind, since, _ = self._state(now)
        return kind == "collective" and now - since > 0.2 * STILL * self.patience

    def _state(self, now: float) -> tuple[str, float, str]:
        """What the main thread does: "waiting" in the engine, blocked in a "collective" of others, or "busy"."""
        wait = self.waiting
        frame = self._main_frame()
        if wait is not None:
            return "waiting", max(wait.since, self._awake), self._text(wait, frame)
        call, outermost = collective_of_the_user(frame)
        if not call:
            self._collective = (0, 0), 0.0
            return "busy", now, f"is at {place_in_user_code(frame)}"
        if self._collective[0] != (outermost, self.waits):
            self._collective = (outermost, self.waits), now
        text = f"is in torch.distributed.{call}, called at {place_in_user_code(frame)}"
        return "collective", max(self._collective[1], self._awake), text

    def _text(self, wait: Wait, frame: FrameType | None, verb: str = "waits") -> str:
        whom = f"rank {wait.rank}" if wait.rank >= 0 else "the others"
        what, module = self.describe(wait.word)
        where = f" of '{module}'" if module else ""
        phase = f" in the backward pass{where}" if wait.backward else f" in the forward pass{where}" if module else ""
        return f"{verb} for {whom} to {what}{phase}, at {place_in_user_code(frame)}"

    def _said(self, now: float) -> dict[int, Said]:
        """What each rank has said not long ago."""
        states: dict[int, Said] = {}
        for rank in range(self.comm.size):
            raw = self._get(f"at/{rank}").decode()
            before, _, times = self._seen.get(rank, ("", 0.0, 0))
            if before != raw:
                self._seen[rank] = raw, now, times + 1
            if raw and now - self._seen[rank][1] < 0.5 * self.patience:
                kind, age, text, since, _ = json.loads(raw)
                states[rank] = Said(kind, age, text, since, self._seen[rank][2])
        return states

    def _for_good(self, states: dict[int, Said]) -> bool:
        """Whether the ranks wait for each other for good. See [Note: blocked at one moment]."""
        kinds = {said.kind for said in states.values()}
        if len(states) < self.comm.size or "busy" in kinds or not {"collective", "waiting"} <= kinds:
            self._blocked = {}
            return False
        first = self._blocked
        if not first or any(first[rank].since != said.since for rank, said in states.items()):
            self._blocked = states
            return False
        # What was said next may have been on its way at that moment, and what is said after that was looked at later.
        again = all(said.times >= first[rank].times + 2 for rank, said in states.items())
        return again and all(said.age >= 0.4 * self.patience for said in states.values())

    def _evaluate(self, now: float) -> None:
        states = self._said(now)
        lines = "\n".join(f"  r{self._names([rank])[1:]} {said.text}" for rank, said in sorted(states.items()))
        kinds = {said.kind for said in states.values()}
        if self._for_good(states):
            advice = (
                "An edit is made on every rank alike. What only one has, shardproof.load_full_state_dict deals out."
                if "edit a parameter" in lines
                else "Call the same things on every rank. Where ranks compute different things before a collective of "
                "your own, let them meet first: shardproof.barrier(model)."
            )
            self.agree_on_verdict(f"The ranks wait for each other for good:\n{lines}\n{advice}")
            self._end_if_blocked(now)
        if len(states) == self.comm.size and "busy" not in kinds:
            shortest = min(said.age for said in states.values())
            if shortest > STILL * self.patience:
                advice = (
                    "The network is very slow, or this is a mistake of shardproof's: please report these lines."
                    if kinds == {"waiting"}
                    else "Call the same collectives on every rank, in the same order."
                )
                self.agree_on_verdict(f"All ranks have waited for each other for {shortest:.0f} s:\n{lines}\n{advice}")
                self._end_if_blocked(now)
        longest = max((said.age for said in states.values() if said.kind != "busy"), default=0.0)
        long = min(longest, now - self._told_at) > 6 * self.patience
        if long and "busy" in kinds and self.comm.rank == 0:
            self._told_at = now
            log.warning("ranks wait for others for more than %.0f s:\n%s", longest, lines)

    def _end_if_blocked(self, now: float) -> None:
        kind, since, _ = self._state(now)
        if kind == "busy":
            return
        self.comm.close_connections()
        self._stop.wait(0.2 * self.patience)
        kind, again, _ = self._state(now)
        if kind != "busy" and again == since and not self._stop.is_set():  # an accelerator's collective cannot be woken
            if self._rank_that_prints() == self.comm.rank:
                print(f"shardproof: {self._get('verdict').decode()}", file=sys.stderr, flush=True)
            os._exit(1)


def _own_connection() -> Any:
    """The store of the default process group, by a connection of its own where it has such."""
    store = dist.distributed_c10d._get_default_store()
    try:
        with tcp_keepalive():
            # With its prefix: below it there may be what ranks of before have left (see comm/store.py).
            return store.clone()  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError, NotImplementedError):
        return store


def _watch(reference: weakref.ref[Watchdog]) -> None:
    while (watchdog := reference()) is not None and dist.is_initialized():
        stop, pause = watchdog._stop, min(1.0, watchdog.patience / 10)
        try:
            watchdog.tick()
        except RuntimeError:  # the store is gone, so the program ends; who waits is told by its connections
            return
        except Exception:
            log.debug("the watchdog goes on", exc_info=True)
        del watchdog
        if stop.wait(pause):
            return


def _leave(reference: weakref.ref[Watchdog]) -> None:
    """At the end of the program. One that ends while it handles an error does not come to it."""
    watchdog = reference()
    if watchdog is not None and watchdog._process == os.getpid() and sys.exception() is None:
        watchdog._stop.set()
        watchdog._thread.join(1.0)
        watchdog.leave_word("left")
        watchdog.comm.leave(watchdog.patience)
