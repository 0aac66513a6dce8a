"""Ctrl-C that no library can swallow, and the other signals that ask a command to end.

[Note: what becomes of a KeyboardInterrupt] Python raises it wherever execution is. If a library there treats any
exception as an answer (torch takes a failed import of numpy to mean that there is no numpy), the interrupt is lost, and
a run that the user wanted to stop begins. So it is remembered, and raised again before training begins. In a finalizer,
Python itself reports the exception and continues.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_heard: list[int] = []


@contextmanager
def remembered() -> Iterator[None]:
    """In this context, SIGINT raises KeyboardInterrupt as usual, and is also remembered."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # the caller handles SIGINT itself
        return

    def receive(number: int, frame: Any) -> None:
        _heard.append(number)
        raise KeyboardInterrupt

    before = sys.unraisablehook

    def unraised(what: Any) -> None:
        if not (_heard and issubclass(what.exc_type, KeyboardInterrupt)):
            before(what)

    _heard.clear()
    sys.unraisablehook = unraised
    signal.signal(signal.SIGINT, receive)
    try:
        yield
    finally:
        sys.unraisablehook = before
        if signal.getsignal(signal.SIGINT) is receive:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupted() -> bool:
    return bool(_heard)


def raise_again() -> None:
    """Raise KeyboardInterrupt if one was swallowed."""
    if _heard:
        raise KeyboardInterrupt


def asking_to_end() -> tuple[signal.Signals, ...]:
    """The signals that ask a command to end. A closed terminal sends SIGHUP, which is ignored under `nohup`."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return signal.SIGINT, signal.SIGTERM, *(() if ignored else (signal.SIGHUP,))


def left_to_rank(worker: int) -> None:
    """Make a process that reads rows for a rank survive the first SIGTERM, which may have been sent to all processes:
    the rank finishes its step, and ends this process with another SIGTERM. Does nothing if the rank ends at once."""

    def receive(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        signal.signal(signal.SIGTERM, receive)


def without_terminal() -> None:
    """If the terminal is closed, discard output to it, which would raise an error."""
    for place in (1, 2):
        try:
            os.write(place, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), place)
