"""Ctrl-C that no library can swallow, and the other signals that ask a command to end.

[Note: what becomes of a KeyboardInterrupt]
Python raises it wherever it is. Where that is below a library that takes any exception for an answer (torch takes a
failed import of numpy for no numpy), it is gone, and a run that somebody wanted to stop begins. So it is
remembered, and raised again before training begins. Where it is a finalizer, Python itself says so and goes on.
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
    """Inside, SIGINT raises KeyboardInterrupt as it does anyway, and is remembered."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # whoever calls us has a use for it
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
    """Raise the KeyboardInterrupt that somebody has swallowed, if there was one."""
    if _heard:
        raise KeyboardInterrupt


def asking_to_end() -> tuple[signal.Signals, ...]:
    """The signals that do. A terminal that is closed sends SIGHUP, which `nohup` has a command ignore."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return signal.SIGINT, signal.SIGTERM, *(() if ignored else (signal.SIGHUP,))


def left_to_rank(worker: int) -> None:
    """Have a process that reads rows for a rank live through the first SIGTERM, which all processes may have been sent:
    the rank takes its step to the end, and ends this process by another one. Not where the rank ends at once."""

    def receive(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        signal.signal(signal.SIGTERM, receive)


def without_terminal() -> None:
    """Where the terminal is closed, have what is written to it go nowhere: it would raise an error."""
    for place in (1, 2):
        try:
            os.write(place, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), place)
