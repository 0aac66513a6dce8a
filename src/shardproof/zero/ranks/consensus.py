"""How ranks that differ agree.

[Note: streams]
Before each collective that is not planned (plan.py), a rank sends every other rank one word: the operation it
wants next. So every rank has an ordered stream of words that all ranks read. Words travel alongside the data and
are read when a result is needed, by which time they have long arrived. If the heads of all streams are equal,
all ranks mean the same operation and go on. If they differ, all ranks see the same heads and draw the same
conclusion: the smallest word is carried out by all; ranks that did not ask for it lend their shard (a gather) or
zeros (a reduction), and only those that asked advance to their next word. So any path on any rank completes, as
long as each rank reaches its step. An exchange that needs all ranks at once (the end of a step, norms, a state
dict) is a meeting: its words are the largest and cannot be lent, so ranks that are at different meetings notice
it immediately. Only the end of a backward pass, a meeting with `deterministic`, can be lent by all other ranks:
see passes.py.

On the CPU, data is sent before its round comes, and may therefore be received in an earlier round of the same
operation. That is harmless (gathers send the same weights, reductions add up) as long as every rank sends exactly
once per round, which `TakesTurns.turn` counts. So no rank ever waits for data of a later round than its own.
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

    Place = tuple[int, int]  # a flat, and a parameter in it

_OPERATIONS = 1 << 24  # words per engine
_MEETING = 1 << 48
_PLACE = 1 << 28  # factor of the parameter that a meeting is about; the bits below hold engine and kind
_ENGINES = 1 << 20  # engines per kind of meeting
_PARAMETERS = 1 << 18  # parameters per flat

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

# A rank at one of these may take part in the end of a step first: it looks at gradients afterwards.
_BEFORE_LOOKING = {UPDATE, EDIT, BARRIER, "enter shardproof.whole", "collect the state dict", "load a state dict"}

DECLARE = "Declare the units that only some ranks use: shardproof.shard(model, stage, dynamic=['visual'])."

# Engines on the same process group take turns in one order, so they share its streams. These live as long as the group,
# because models are garbage collected at different times on different ranks.
_streams: dict[str, Made[Streams]] = {}


def _word_of_meeting(number: int, what: str) -> int:
    """The word of an engine's meeting. Its lowest bit is free, and says whether the rank has left the plan."""
    return _MEETING + 2 * (MEETINGS.index(what) * _ENGINES + number)


def _meeting_of_word(word: int) -> tuple[int, str]:
    """The engine's number, and the kind of meeting."""
    what, number = divmod((word - _MEETING) % _PLACE // 2, _ENGINES)
    return number, MEETINGS[what]


def _place_in_word(place: Place | None) -> int:
    return 0 if place is None else (1 + place[0] * _PARAMETERS + place[1]) * _PLACE


def _place_of_word(word: int) -> Place | None:
    number = (word - _MEETING) // _PLACE - 1
    return None if number < 0 else divmod(number, _PARAMETERS)


def tag_of(number: int, operation: int) -> int:
    """The tag of an operation's messages; engines on one group have different tags."""
    return number * 65536 + operation


def explained(error: Exception) -> Exception:
    """`error`, or, if a closed connection caused it, an error that names the lost rank."""
    if not is_closed_connection(error):
        return error
    watchdogs = (streams.watchdog for group, streams in _streams.values() if group is not None and group() is not None)
    return next((watchdog.lost(error) for watchdog in watchdogs if watchdog is not None), error)


class Streams:
    """The streams of one process group.

    Attributes:
        ranks: the ranks that send words; only one if the others are imagined.
        plan: operations that all ranks have agreed to carry out without words.
        mine: words of this rank that no round has carried out yet; `theirs`: by rank, the head of its stream if it has
            been read but not carried out.
        posted: number of operations and meetings that this rank has come to.
        words: number of words it has sent; `rounds_apart`: number of rounds in which ranks differed.
        paid: number of planned operations that it carried out only because others rely on them.
        parted: whether ranks may have computed different things since the last `level`.
        seconds: time spent waiting for words.
        watchdog: notices ranks that never arrive; None with a single rank.
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
        """Register an engine. Its number is the same on all ranks, because they shard models in the same order."""
        self.engines[self.count] = engine
        self.count += 1
        return self.count - 1

    @property
    def done(self) -> int:
        """How many of the posted operations were carried out."""
        return self.posted - len(self.mine)

    def announce(self, engine: TakesTurns, operation: int, size: Size) -> None:
        """Note what an operation moves and how, so that this rank can take part even if its model is gone."""
        self.sizes[engine.number * _OPERATIONS + operation] = engine.comm, size

    def want(self, engine: TakesTurns, operation: int) -> int:
        """Announce what this rank wants next, unless it is planned. Returns the position to pass to `settle`."""
        word = engine.number * _OPERATIONS + operation
        if self.plan.follow(word):
            self.posted += 1  # and carried out: a plan starts when no words are left
        else:
            self._leave_plan()
            self._post(word)
        return self.posted - 1

    def meet(self, engine: TakesTurns, what: str, place: Place | None) -> None:
        """Wait until all ranks are at the same one of `MEETINGS`, and for the same parameter if it concerns one.
        Earlier operations of all ranks are carried out first."""
        word = _word_of_meeting(engine.number, what)
        on_plan = self.plan.at == len(self.plan.words) if what == END else self.plan.follow(word)
        if not on_plan:
            self._leave_plan()
        self._post(word + _place_in_word(place) + self.plan.left)
        self.settle(self.posted - 1)

    def agree_on_plan(self, engine: TakesTurns, flags: torch.Tensor, numbers: Sequence[int]) -> list[bool]:
        """At the end of a step: as `Collectives.agree`; starts a plan if all ranks have the same one in mind."""
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
        """This rank wants something else: first carry out what the others rely on, up to the next meeting."""
        for word in itertools.takewhile(lambda word: word < _MEETING, self.plan.leave()):
            self.paid += 1
            engine = self.engines.get(word // _OPERATIONS)
            if engine is not None:
                engine.pay(word % _OPERATIONS)
            else:
                self._pay_for_the_gone(word, sent=False)

    def _pay_for_the_gone(self, word: int, sent: bool) -> None:
        """The model is gone here, but ranks that still use it must not wait. Data that is exchanged by hand may have
        been `sent` already."""
        if word not in self.sizes:
            raise DesyncError(NOT_HERE)
        (comm, size), operation = self.sizes[word], word % _OPERATIONS
        if not (sent and comm.is_tagged(operation, size.sharded)):
            comm.pay(operation, size, tag=tag_of(word // _OPERATIONS, operation))

    def settle(self, position: int) -> None:
        """Run rounds until this rank's word at `position` has been carried out."""
        while self.done <= position:
            self._round()

    def advance(self) -> None:
        """Run the rounds that need no waiting; in a tree there are none."""
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
        if chosen >= _MEETING and any(head != chosen for head in heads):  # has any rank left the plan?
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
        """After a meeting: if one rank may hold a unit that another has only lent, all ranks drop what they hold."""
        for engine in list(self.engines.values()) if self.parted else ():
            engine.hold_nothing()
        self.parted = False

    def _unanimous(self) -> bool:
        """Whether the heads of all streams are equal; ranks that come early wait. See comm/tree.py."""
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
        """Whether some ranks are at a meeting, and the others at one that may come after it. After the end of a pass
        that is any; after the end of a step, one of those that follow it, as a rank that has contributed nothing since
        gradients were final does not end the step by itself."""
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
        """Take part in a meeting that not all ranks have come to; `mine`: whether this one has."""
        number, what = _meeting_of_word(chosen)
        if what == PASS:  # what the others do next is not known
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
            if not is_closed_connection(problem):  # an error of this rank that shows here: something queued has failed
                raise
            raise watchdog.lost(problem, rank) from None
        finally:
            watchdog.waiting = None

    def _apart(self, chosen: int, heads: list[int]) -> None:
        """Ranks differ: refuse if that cannot be resolved."""
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
        """If some ranks are about to edit a parameter, all ranks name it in their error."""
        meetings = [_meeting_of_word(head) for head in heads]
        editing = {number for number, what in meetings if what == EDIT} if len(set(meetings)) > 1 else set()
        engine = next((self.engines[number] for number in sorted(editing) if number in self.engines), None)
        if engine is not None:
            self.mine.popleft()  # the ranks wait for nothing else, and may go on with another model
            self.theirs.clear()
            engine.edits.refuse()

    def refusal(self, text: str) -> DesyncError:
        """The error for ranks that cannot go on together."""
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
