"""Ranks on one machine read each other's memory, so that data between them is copied only once.

[Note: one copy]
On the way through a socket data is copied into the kernel, cut into packets, and copied out again. Where the kernel
lets a process read another's memory (Linux: `process_vm_readv`, to processes of one user), only a note goes through a
socket: where the data lies. The other rank reads it from there, straight into its own buffer, and sends a note back.
16 MB between two processes take 2.9 ms of a processor so, and 7.5 with gloo's sends and receives
(benchmarks/collectives.py). A message is as gloo's: it has a tag, it moves when the receiver has a buffer for it,
in the background, and the sender's wait ends when its data was read. Ranks on other machines, in other containers, or
of a system that does not allow it (Yama on some, no Linux) are no neighbours, and gloo carries what goes to them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import weakref
from collections import deque
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from shardproof.zero.comm.connections import NeighbourGone
from shardproof.zero.comm.groups import all_gather_object

T = TypeVar("T")

VARIABLE = "SHARDPROOF_NEIGHBOURS"  # 0: every message goes by gloo

_NOTE = struct.Struct("=qqQq")  # tag or _READ, number of the message, address, bytes
_READ = -1
_CREDENTIALS = struct.Struct("3i")  # process, user, group of who is at the other end of a socket
_PATIENCE = 10.0  # seconds for a neighbour to answer while connections are made

_LIBC: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


class _Message:
    """One that is sent or awaited. `wait()` returns when its data has moved."""

    __slots__ = ("_done", "_tensor", "place", "problem")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self.place = tensor.data_ptr(), tensor.nbytes
        self.problem: Exception | None = None
        self._done = threading.Lock()  # held until it is done: the cheapest that a thread can wait for
        self._done.acquire()

    def done(self, problem: Exception | None = None) -> None:
        self.problem = problem
        self._tensor = None  # the thread may have the message for longer than who waits, who takes buffers again
        self._done.release()

    def wait(self) -> None:
        self._done.acquire()
        self._done.release()
        if self.problem is not None:
            raise self.problem


class _Offer(NamedTuple):
    """Data of a neighbour's that may be read."""

    number: int
    address: int
    nbytes: int


class _Queues(Generic[T]):
    """What waits, by tag, the first to come first."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[T]] = {}

    def add(self, tag: int, one: T) -> None:
        self._queues.setdefault(tag, deque()).append(one)

    def take(self, tag: int) -> T | None:
        queue = self._queues.get(tag)
        if queue is None:
            return None
        first = queue.popleft()
        if not queue:
            del self._queues[tag]
        return first

    def take_all(self) -> list[T]:
        everything = [one for queue in self._queues.values() for one in queue]
        self._queues.clear()
        return everything


class _Neighbour:
    """A rank on this machine.

    Attributes:
        offers, awaited: by tag: what came before it was awaited, and what is awaited and has not come.
        sent: what it has not read yet, by number.
        unsaid: notes for which the socket has no room yet.
        problem: why nothing comes any more.
    """

    def __init__(self, rank: int, connection: socket.socket, process: int, selector: selectors.BaseSelector) -> None:
        self.rank, self.connection, self.process, self._selector = rank, connection, process, selector
        self._saying = threading.Lock()
        self.offers: _Queues[_Offer] = _Queues()
        self.awaited: _Queues[_Message] = _Queues()
        self.sent: dict[int, _Message] = {}
        self.unsaid: deque[bytes] = deque()
        self.problem: Exception | None = None

    def say(self, *notes: bytes) -> None:
        """Send notes, now or when there is room: two ranks that wait for room in each other's sockets read nothing."""
        with self._saying:
            waited = bool(self.unsaid)
            self.unsaid.extend(notes)
            try:
                while self.unsaid:
                    self.connection.send(self.unsaid[0], socket.MSG_DONTWAIT)
                    self.unsaid.popleft()
            except BlockingIOError:
                pass
            except BaseException:  # an interrupt, too: a note would be lost or said twice, and nobody would hear of it
                self.close()
                raise
            if waited != bool(self.unsaid):
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.unsaid else 0)
                self._selector.modify(self.connection, events, self)

    def close(self) -> None:
        """End every wait with an error, here and there: the threads hear of it."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        with self._saying:  # nobody says anything to a socket that has its number afterwards
            self._selector.unregister(self.connection)
            self.connection.close()

    def read(self, offer: _Offer, message: _Message) -> None:
        """Copy what it offers into the buffer of `message`, and tell it."""
        into, nbytes = message.place
        try:
            if offer.nbytes != nbytes:
                raise OSError(f"it sends {offer.nbytes} bytes, {nbytes} are awaited")
            _read(self.process, offer.address, into, nbytes)
            self.say(_NOTE.pack(_READ, offer.number, 0, 0))
        except OSError as problem:
            message.done(NeighbourGone(self.rank, problem))
        else:
            message.done()


class Neighbours:
    """The neighbours of one rank in one process group. Its `send` and `recv` are as those of a process group.

    Args:
        found: of each neighbour: its rank, the connection to it, and its process.
        complete: whether all ranks of the group are neighbours of each other.
    """

    def __init__(self, found: list[tuple[int, socket.socket, int]], complete: bool) -> None:
        self.complete = complete
        self._selector = selectors.DefaultSelector()
        self._ranks = {rank: _Neighbour(rank, end, process, self._selector) for rank, end, process in found}
        self._lock = threading.Lock()
        self._count = 0
        for neighbour in self._ranks.values():
            self._selector.register(neighbour.connection, selectors.EVENT_READ, neighbour)
        _all.add(self)
        threading.Thread(target=self._hear_all, name="shardproof-neighbours", daemon=True).start()

    def __contains__(self, rank: int) -> bool:
        return rank in self._ranks

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _Message:
        """Offer a contiguous tensor, which must not change until the message is done."""
        neighbour = self._ranks[rank]
        with self._lock:
            self._count += 1
            message = _Message(tensors[0])
            if neighbour.problem is not None:
                message.done(neighbour.problem)
                return message
            neighbour.sent[self._count] = message
            note = _NOTE.pack(tag, self._count, *message.place)
        with contextlib.suppress(OSError):  # the thread hears of it, too, and ends the message
            neighbour.say(note)
        return message

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _Message:
        """Await what the neighbour sends next with this tag, in a contiguous tensor of the same size."""
        neighbour, message = self._ranks[rank], _Message(tensors[0])
        with self._lock:
            offer, problem = neighbour.offers.take(tag), neighbour.problem
            if offer is None and problem is None:
                neighbour.awaited.add(tag, message)
        if offer is not None:
            neighbour.read(offer, message)  # this rank is the later one: it need not wait
        elif problem is not None:
            message.done(problem)
        return message

    def close(self) -> None:
        """End every wait with an error, in any thread, here and at the neighbours. Nothing can be sent afterwards."""
        for neighbour in self._ranks.values():
            neighbour.close()

    def let_go(self) -> None:
        """Close the connections in this process, and in no other that has them."""
        for neighbour in self._ranks.values():
            neighbour.connection.close()

    # --- the thread -----------------------------------------------------------------------------

    def _hear_all(self) -> None:
        with self._selector as selector:
            while selector.get_map():
                for key, events in selector.select():
                    try:
                        self._look(key.data, events)
                    except Exception as problem:  # whatever it is: nobody may wait for a thread that has ended
                        self._lose(key.data, str(problem) or repr(problem))

    def _look(self, neighbour: _Neighbour, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            neighbour.say()
        if events & selectors.EVENT_READ:
            note = neighbour.connection.recv(_NOTE.size)
            if not note:
                raise ConnectionError("closed by peer")
            self._hear(neighbour, note)

    def _hear(self, neighbour: _Neighbour, note: bytes) -> None:
        tag, number, address, nbytes = _NOTE.unpack(note)
        if tag == _READ:
            with self._lock:
                read = neighbour.sent.pop(number)
            read.done()
            return
        offer = _Offer(number, address, nbytes)
        with self._lock:
            message = neighbour.awaited.take(tag)
            if message is None:
                neighbour.offers.add(tag, offer)
        if message is not None:
            neighbour.read(offer, message)

    def _lose(self, neighbour: _Neighbour, why: str) -> None:
        with self._lock:
            neighbour.problem = problem = NeighbourGone(neighbour.rank, why)
            left = [*neighbour.sent.values(), *neighbour.awaited.take_all()]
            neighbour.sent.clear()
        neighbour.leave()
        for message in left:
            message.done(problem)


def _after_fork() -> None:
    """A child (a worker of a DataLoader) must neither keep open what a rank that is killed closes, nor shut it."""
    for neighbours in list(_all):
        neighbours.let_go()


_all: weakref.WeakSet[Neighbours] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _read(process: int, address: int, into: int, nbytes: int) -> None:
    """Copy memory of another process to the address `into`. Other threads of Python's go on meanwhile.

    Raises:
        OSError: the system does not allow it, or the process is gone.
    """
    while nbytes:
        here, there = _Iovec(into, nbytes), _Iovec(address, nbytes)
        got = _LIBC.process_vm_readv(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if got <= 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        address, into, nbytes = address + got, into + got, nbytes - got


def neighbours_of(owner: Any, group: dist.ProcessGroup) -> Neighbours | None:
    """As `find_neighbours`; closed when the process group `owner` ends."""
    found = find_neighbours(group)
    if found is not None:
        weakref.finalize(owner, found.close).atexit = False
    return found


def find_neighbours(group: dist.ProcessGroup) -> Neighbours | None:
    """The ranks of a gloo group whose memory this process may read, and that may read its own; None where there are
    none. All ranks call it."""
    rank, secret = dist.get_rank(group), secrets.token_bytes(16)
    probe = ctypes.create_string_buffer(secret, 16)
    listener = _listen()
    mine = None if listener is None else (listener.getsockname(), secret, ctypes.addressof(probe))
    known = all_gather_object(group, mine)
    others = [r for r, theirs in enumerate(known) if theirs is not None and r != rank] if listener else []
    met = {r: end for r in others if r < rank and (end := _call(known[r][0], rank, known[r][1])) is not None}
    calls = sum(rank in called for called in all_gather_object(group, list(met)))
    met |= {} if listener is None else _answer(listener, secret, calls)
    readable = {r: process for r, end in met.items() if _holds(process := _process_at(end), *known[r][1:])}
    allowed = all_gather_object(group, list(readable))
    found = [(r, met[r], process) for r, process in readable.items() if rank in allowed[r]]
    for r in set(met) - {r for r, _, _ in found}:
        met[r].close()
    complete = all(len(theirs) == len(known) - 1 for theirs in allowed)
    return Neighbours(found, complete) if found else None


def _listen() -> socket.socket | None:
    """A socket with a name that no file has; None where the system has no such, or is told not to."""
    if not hasattr(_LIBC, "process_vm_readv") or os.environ.get(VARIABLE) == "0":
        return None
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:  # not every Linux has these, nor allows them
        return None
    listener.bind("\0shardproof-" + secrets.token_hex(16))
    listener.listen(1024)
    listener.settimeout(_PATIENCE)
    return listener


def _call(name: bytes, rank: int, secret: bytes) -> socket.socket | None:
    """A connection to the process that listens there, if it is on this machine."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(name)
        connection.send(secret + rank.to_bytes(8, "little"))
    except OSError:
        connection.close()
        return None
    return connection


def _answer(listener: socket.socket, secret: bytes, calls: int) -> dict[int, socket.socket]:
    """So many connections of those who know the secret, by rank."""
    met: dict[int, socket.socket] = {}
    with listener, contextlib.suppress(OSError):
        while len(met) < calls:
            connection, _ = listener.accept()
            connection.settimeout(_PATIENCE)
            word = connection.recv(64)
            if word.startswith(secret):
                connection.settimeout(None)
                met[int.from_bytes(word[16:], "little")] = connection
            else:
                connection.close()
    return met


def _process_at(connection: socket.socket) -> int:
    """The number of the process at the other end, 0 if it is not visible or another user's."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(credentials)
    return process if user == os.geteuid() else 0


def _holds(process: int, secret: bytes, address: int) -> bool:
    """Whether it is the process that has the secret there, and may be read."""
    found = ctypes.create_string_buffer(16)
    try:
        _read(process, address, ctypes.addressof(found), 16)
    except OSError:
        return False
    return found.raw == secret
