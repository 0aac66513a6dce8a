"""How ranks that differ agree.

[Note: streams]
Before each collective that is not planned (plan.py) a rank sends every other rank one word: what it wants
next. So every rank has a stream of words, in order, that all ranks read. The words travel beside the data and
are read when a result is needed, when they have long arrived. Where the heads of all streams are equal,
everybody meant the same operation and goes on. Where they differ, all ranks see the same heads and draw the
same conclusion: the smallest word is carried out by all, those who did not ask for it lend their shard (a
gather) or zeros (a reduction), and only those who asked go on to their next word. So any path on any rank comes
to its end as long as each rank reaches its step. What needs all ranks at once (the end of a step, norms, a
state dict) is a meeting: its words are the largest and cannot be lent, so ranks that are at different meetings
know it at once. Only the end of a pass, where ranks meet with `deterministic`, is lent from all others: passes.py.

On the CPU data is sent before its round comes, and may so be taken by an earlier round of the same operation.
That is harmless (a gather sends the same weights, reductions add up) as long as every rank sends once for each
round: `TakesTurns.turn` counts. So nobody ever waits for data of a later round than its own.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, cast

import torch

from shardproof.errors import DesyncError
from shardproof.zero.autograd import in_backward
from shardproof.zero.comm.connections import is_closed_connection
from shardproof.zero.ranks.plan import Plan
from shardproof.zero.ranks.watchdog import NOT_HERE, Wait, Watchdog

if TYPE_CHECKING:
    from shardproof.zero.comm.collectives import Collectives
    from shardproof.zero.comm.groups import Made
    from shardproof.zero.comm.pending import Size
    from shardproof.zero.comm.tree import Tree
    from shardproof.zero.ranks.turns import TakesTurns

    Place = tuple[int, int]  # of which flat, of which parameter in it

_OPERATIONS = 1 << 24  # words of one engine
_MEETING = 1 << 48
_PLACE = 1 << 28  # times the parameter that a meeting is about; below it engines and what for
_ENGINES = 1 << 20  # that may be at one kind of meeting
_PARAMETERS = 1 << 18  # of one flat

PASS = "finish a backward pass"
END = "finish a step"
UPDATE = "update the parameters"
EDIT = "edit a parameter in place"
BARRIER = "wait for all ranks"
MEETINGS = (
    PASS,
    END,
    UPDATE,
    "compute norms",
    "check the first update",
    "collect a gradient",
    "unscale gradients",
    "differentiate a gradient",
    EDIT,
    "take in what was attached to the model",
    "enter shardproof.whole",
    "leave shardproof.whole",
    "collect the state dict",
    "load a state dict",
    BARRIER,
)

# Who is at one of these may take part in the end of a step on the way: it looks at gradients afterwards.
_BEFORE_LOOKING = {UPDATE, EDIT, BARRIER, "enter shardproof.whole", "collect the state dict", "load a state dict"}

DECLARE = "Declare the units that only some ranks use: shardproof.shard(model, stage, dynamic=['visual'])."

# Engines that share a process group take turns in one order, so they share its streams, which live as long as the
# group: ranks collect models at different times.
_streams: dict[str, Made[Streams]] = {}


def _word_of_meeting(number: int, what: str) -> int:
    """The word of an engine's meeting. The lowest bit is free: it says that a rank has left the plan."""
    return _MEETING + 2 * (MEETINGS.index(what) * _ENGINES + number)


def _meeting_of_word(word: int) -> tuple[int, str]:
    """Of which engine, and what for."""
    what, number = divmod((word - _MEETING) % _PLACE // 2, _ENGINES)
    return number, MEETINGS[what]


def _place_in_word(place: Place | None) -> int:
    return 0 if place is None else (1 + place[0] * _PARAMETERS + place[1]) * _PLACE


def _place_of_word(word: int) -> Place | None:
    number = (word - _MEETING) // _PLACE - 1
    return None if number < 0 else divmod(number, _PARAMETERS)


def tag_of(number: int, operation: int) -> int:
    """The tag of an operation's messages; engines on one group do not share tags."""
    return number * 65536 + operation


def explained(error: Exception) -> Exception:
    """`error`, or where a closed connection was its cause, one that says whose."""
    if not is_closed_connection(error):
        return error
    watchdogs = (streams.watchdog for group, streams in _streams.values() if group is not None and group() is not None)
    return next((watchdog.lost(error) for watchdog in watchdogs if watchdog is not None), error)


class Streams:
    """The streams of one process group.

    Attributes:
        ranks: those that send words; one, where the others are imagined.
        plan: what all ranks have agreed to do without words.
        mine: words of this rank that no round has carried out yet; `theirs` the head of each other stream that has been
            read and not carried out, by rank.
        posted: how many operations and meetings this rank has come to.
        words: how many words it has sent; `rounds_apart` how many rounds found ranks that differ.
        paid: how many planned operations it carried out only because others rely on them.
        parted: whether ranks may have computed different things since the last `level`.
        seconds: time spent waiting for words.
        watchdog: notices ranks that never come; None where there is one rank.
    """

    def __init__(self, comm: Collectives) -> None:
        self.comm = comm
        self.engines: weakref.WeakValueDictionary[int, TakesTurns] = weakref.WeakValueDictionary()
        self.count = 0
        self.mine: deque[int] = deque()
        self.ranks = range(comm.size if comm.real else 1)
        self.theirs: dict[int, int] = {}
        self.plan = Plan()
        self.sizes: dict[int, tuple[Collectives, Size]] = {}
        self.posted = self.words = self.rounds_apart = self.paid = 0
        self.seconds, self.parted = 0.0, False
        self.watchdog = Watchdog(comm, self._what_and_where) if comm.real else None

    @staticmethod
    def of(comm: Collectives) -> Streams:
        streams = comm.once(_streams, lambda: Streams(comm))
        if streams.watchdog is not None:
            comm.lost = streams.watchdog.lost
        return streams

    def join(self, engine: TakesTurns) -> int:
        """Register an engine; its number is the same on all ranks, because they shard in the same order."""
        self.engines[self.count] = engine
        self.count += 1
        return self.count - 1

    @property
    def done(self) -> int:
        """How many of these were carried out."""
        return self.posted - len(self.mine)

    def announce(self, engine: TakesTurns, operation: int, size: Size) -> None:
        """Note what an operation moves and how, so that this rank can take part when the model is gone here."""
        self.sizes[engine.number * _OPERATIONS + operation] = engine.comm, size

    def want(self, engine: TakesTurns, operation: int) -> int:
        """Say what this rank wants next, unless the plan says it. Returns what to pass to `settle`."""
        word = engine.number * _OPERATIONS + operation
        if self.plan.follow(word):
            self.posted += 1  # and done: a plan begins when every word has been carried out
        else:
            self._leave_plan()
            self._post(word)
        return self.posted - 1

    def meet(self, engine: TakesTurns, what: str, place: Place | None) -> None:
        """Wait until all ranks are here for the same of `MEETINGS`, and about the same parameter where it is about
        one; what they wanted before is carried out."""
        word = _word_of_meeting(engine.number, what)
        on_plan = self.plan.at == len(self.plan.words) if what == END else self.plan.follow(word)
        if not on_plan:
            self._leave_plan()
        self._post(word + _place_in_word(place) + self.plan.left)
        self.settle(self.posted - 1)

    def agree_on_plan(self, engine: TakesTurns, flags: torch.Tensor, numbers: Sequence[int]) -> list[bool]:
        """At the end of a step: what `Collectives.agree` does, and a plan if all ranks have the same in mind."""
        digest = self.plan.end(engine.number)
        if not all(each.adaptive for each in self.engines.values()):
            digest = 0
        *same, planned = self.comm.agree([*numbers, digest], flags)
        if digest and planned:
            self.plan.begin()
        return same

    def _post(self, word: int) -> None:
        if self.comm.real and self.comm.tree is None:
            self.comm.words.send(word)
        self.mine.append(word)
        self.posted += 1
        self.words += 1

    def _leave_plan(self) -> None:
        """This rank wants something else: pay what the others rely on, up to the next meeting."""
        for word in itertools.takewhile(lambda word: word < _MEETING, self.plan.leave()):
            self.paid += 1
            engine = self.engines.get(word // _OPERATIONS)
            if engine is not None:
                engine.pay(word % _OPERATIONS)
            else:
                self._pay_for_the_gone(word, sent=False)

    def _pay_for_the_gone(self, word: int, sent: bool) -> None:
        """The model is gone here, but who still counts on it must not wait. What is exchanged by hand may have been
        `sent` before."""
        if word not in self.sizes:
            raise DesyncError(NOT_HERE)
        (comm, size), operation = self.sizes[word], word % _OPERATIONS
        if not (sent and comm.is_tagged(operation, size.sharded)):
            comm.pay(operation, size, tag=tag_of(word // _OPERATIONS, operation))

    def settle(self, position: int) -> None:
        """Hold rounds until this rank's word at `position` was carried out."""
        while self.done <= position:
            self._round()

    def advance(self) -> None:
        """Hold the rounds that need no waiting; in a tree all do."""
        if self.comm.tree is not None:
            return
        others = [rank for rank in self.ranks if rank != self.comm.rank]
        while self.mine and all(rank in self.theirs or self.comm.words.is_here(rank) for rank in others):
            self._round()

    def _round(self) -> None:
        if self.comm.tree is None:
            heads = [self._head(rank) for rank in self.ranks]
        elif self._unanimous():
            heads = [self.mine[0]] * len(self.ranks)
        else:
            heads = self._heads_by_tree()
        chosen = min(heads)
        self.parted |= len(set(heads)) > 1 or (chosen >= _MEETING and chosen % 2 == 1)  # off the plan
        if chosen >= _MEETING and any(head != chosen for head in heads):  # has anybody left the plan?
            leavers = [rank for rank, head in enumerate(heads) if head & 1]
            heads = [head & ~1 for head in heads]
            chosen = min(heads)
            if leavers and len(set(heads)) == 1:
                self.rounds_apart += 1
                self.plan.leave()
        lends = self._may_be_lent(chosen, heads)
        if any(head != chosen for head in heads) and not lends:
            self._apart(chosen, heads)
        mine = heads[self.comm.rank] == chosen
        if mine:
            self.mine.popleft()
        self.theirs = {rank: word for rank, word in self.theirs.items() if heads[rank] != chosen}
        engine = self.engines.get(chosen // _OPERATIONS)
        if engine is not None:
            engine.turn(chosen % _OPERATIONS, mine)
        elif chosen < _MEETING:
            self._pay_for_the_gone(chosen, sent=mine)
        if lends:
            self._lend_meeting(chosen, mine)

    def level(self) -> None:
        """Behind a meeting: where one rank may hold what another has only lent, all of them hold nothing."""
        for engine in list(self.engines.values()) if self.parted else ():
            engine.hold_nothing()
        self.parted = False

    def _unanimous(self) -> bool:
        """Whether the heads of all streams are one; holds up who comes early. See comm/tree.py."""
        start = time.monotonic()
        with self._waiting(-1, self.mine[0]):
            same = self.comm.agree([self.mine[0]])
        self.seconds += time.monotonic() - start
        return same[0]

    def _heads_by_tree(self) -> list[int]:
        heads = torch.full((len(self.ranks),), -1, device="cpu")
        heads[self.comm.rank] = self.mine[0]
        with self._waiting(-1, self.mine[0]):
            return cast("Tree", self.comm.tree).largest(heads).tolist()

    def _may_be_lent(self, chosen: int, heads: list[int]) -> bool:
        """Whether some ranks are at a meeting, and the others at one that they may come to after it: at any after the
        end of a pass; of a step, at what follows it, as a rank that has added nothing since gradients were final does
        not end the step by itself."""
        if chosen < _MEETING:
            return False
        number, what = _meeting_of_word(chosen)
        engine = self.engines.get(number)
        others = [_meeting_of_word(head) for head in heads if head != chosen]
        if not others or engine is None:
            return False
        if what == PASS:
            return engine.adaptive
        return what == END and all(n == number and w in _BEFORE_LOOKING for n, w in others)

    def _lend_meeting(self, chosen: int, mine: bool) -> None:
        """Take part in a meeting that not all ranks have come to; this one has where it is `mine`."""
        number, what = _meeting_of_word(chosen)
        if what == PASS:  # nobody knows what the others do next
            self.rounds_apart += 1
            self.plan.leave()
        if not mine:
            gradients = self.engines[number].gradients
            (gradients.lend_pass if what == PASS else gradients.come_to_an_end)()

    def _head(self, rank: int) -> int:
        if rank == self.comm.rank:
            return self.mine[0]
        if rank not in self.theirs:
            start = time.monotonic()
            with self._waiting(rank, self.mine[0]):
                self.theirs[rank] = self.comm.words.receive(rank)
            self.seconds += time.monotonic() - start
        return self.theirs[rank]

    def waiting(self, number: int, operation: int) -> AbstractContextManager[None]:
        """Around a wait for the data of an operation."""
        if self.watchdog is None:
            return nullcontext()
        return self._waiting(-1, number * _OPERATIONS + operation)

    @contextmanager
    def _waiting(self, rank: int, word: int) -> Iterator[None]:
        watchdog = cast("Watchdog", self.watchdog)
        watchdog.waiting = Wait(rank, word, time.monotonic(), in_backward())
        watchdog.waits += 1
        try:
            yield
        except RuntimeError as problem:
            if not is_closed_connection(problem):  # of this rank, and only told here: what was queued has failed
                raise
            raise watchdog.lost(problem, rank) from None
        finally:
            watchdog.waiting = None

    def _apart(self, chosen: int, heads: list[int]) -> None:
        """Ranks differ: refuse where that cannot be mended."""
        self.rounds_apart += 1
        engine = self.engines.get(chosen // _OPERATIONS)
        if engine is None and chosen < _MEETING:
            return
        if chosen >= _MEETING:
            self._refuse_edit(heads)
        if engine is None or not engine.adaptive:
            places = cast("Watchdog", self.watchdog).places(self.rounds_apart)
            lines = "\n".join(
                f"  rank {rank} wants to {self.describe(head)}{place}"
                for rank, (head, place) in enumerate(zip(heads, places, strict=True))
            )
            advice = (
                "What needs all ranks must be called on all of them, in the same order (that of a set differs between "
                "processes: sort it), after equally many steps."
                if engine is None
                else DECLARE
            )
            raise self.refusal(f"The ranks are not doing the same thing:\n{lines}\n{advice}")

    def _refuse_edit(self, heads: list[int]) -> None:
        """Where some ranks are about to edit a parameter, all of them name it."""
        meetings = [_meeting_of_word(head) for head in heads]
        editing = {number for number, what in meetings if what == EDIT} if len(set(meetings)) > 1 else set()
        engine = next((self.engines[number] for number in sorted(editing) if number in self.engines), None)
        if engine is not None:
            self.mine.popleft()  # the ranks wait for nothing else, and may go on with another model
            self.theirs.clear()
            engine.edits.refuse()

    def refusal(self, text: str) -> DesyncError:
        """The error of ranks that cannot go on together."""
        return DesyncError(cast("Watchdog", self.watchdog).agree_on_verdict(text))

    def describe(self, word: int) -> str:
        if word >= _MEETING:
            return self._describe_meeting(word)
        engine = self.engines.get(word // _OPERATIONS)
        flat = engine.flat_at(word % _OPERATIONS // 2) if engine is not None else None
        return f"{'reduce the gradients of' if word % 2 else 'gather'} '{flat.unit.name if flat else '?'}'"

    def _describe_meeting(self, word: int) -> str:
        (number, what), place = _meeting_of_word(word), _place_of_word(word)
        engine = self.engines.get(number)
        if engine is None:
            return what
        if place is not None:
            return f"{what}: '{engine.flat_at(place[0]).names[place[1]]}'"
        return f"{what} of the model that was sharded as number {number + 1}" if len(self.engines) > 1 else what

    def _what_and_where(self, word: int) -> tuple[str, str]:
        engine = self.engines.get(word // _OPERATIONS) if word < _MEETING else None
        return self.describe(word), engine.running() if engine is not None else ""
