"""Promise: connections to other machines are closed by the kernel when these fall silent, after as long as one says."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardproof.errors import EngineError
from shardproof.zero.comm import connections
from shardproof.zero.comm.connections import silence, tcp_keepalive


@contextmanager
def connection(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """One that is opened inside of `tcp_keepalive`; both ends lie here, which is not asked about."""
    monkeypatch.setattr(connections, "_ends", lambda _: ("here", "there"))
    with socket.create_server(("127.0.0.1", 0)) as server, tcp_keepalive():
        made = socket.create_connection(server.getsockname())
    with made:
        yield made


@pytest.mark.parametrize(("told", "milliseconds"), [("", 6000), ("60", 60_000), ("7.5", 7500)])
def test_the_kernel_gives_it_as_long_as_the_variable_says(monkeypatch, told, milliseconds):
    monkeypatch.setenv("SHARDPROOF_SILENCE", told)
    with connection(monkeypatch) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == milliseconds


def test_nought_is_no_limit(monkeypatch):
    monkeypatch.setenv("SHARDPROOF_SILENCE", "0")
    with connection(monkeypatch) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


def test_connections_of_this_machine_are_left_alone():
    with socket.create_server(("127.0.0.1", 0)) as server, tcp_keepalive():
        made = socket.create_connection(server.getsockname())
    with made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0


@pytest.mark.parametrize("told", ["soon", "-1", "inf", "nan"])
def test_what_is_no_number_of_seconds_is_refused(monkeypatch, told):
    monkeypatch.setenv("SHARDPROOF_SILENCE", told)
    with pytest.raises(EngineError, match=f"SHARDPROOF_SILENCE={told}: takes seconds"):
        silence()
