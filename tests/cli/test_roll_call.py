"""Promise: launchers of several machines meet, or say who is missing, what is wrong and who is gone."""

from __future__ import annotations

import io
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from shardproof.cli.processes import roll_call
from shardproof.cli.processes.roll_call import RollCall
from shardproof.errors import ConfigError, ShardproofError


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Future[RollCall]]:
    monkeypatch.setattr(roll_call, "GRACE", 0.2)
    pool = ThreadPoolExecutor(4)
    return lambda nodes, rank, port: pool.submit(RollCall, nodes, rank, "localhost", port)


def test_all_meet_and_know_each_other(begin, port):
    calls = [begin(3, rank, port) for rank in (2, 0, 1)]
    assert [call.result(60).hosts for call in calls] == [[socket.gethostname()] * 3] * 3
    with socket.create_server(("", port)):  # the port is free for torch, though connections are open
        pass


def test_who_is_missing_is_told(begin, port, monkeypatch):
    monkeypatch.setattr(roll_call, "PATIENCE", 0.3)
    said = io.StringIO()  # not capfd: what is written while it is being read is lost
    monkeypatch.setattr(sys, "stderr", said)
    late = begin(3, 0, port), begin(3, 2, port)
    while "no word from --node-rank 1 of 3 machines" not in said.getvalue():
        assert not any(call.done() for call in late)
        time.sleep(0.05)
    begin(3, 1, port)
    assert [call.result(60).rank for call in late] == [0, 2]


def test_nobody_is_there(begin, port, capfd, monkeypatch):
    monkeypatch.setattr(roll_call, "PATIENCE", 0.3)
    monkeypatch.setattr(roll_call, "LIMIT", 1.5)
    with pytest.raises(ShardproofError, match=r"waited 2 s .*no answer"):
        begin(2, 1, port).result(60)
    assert "no answer" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("others", "text"),
    [([(3, 1), (3, 1)], "both have --node-rank 1"), ([(2, 1)], r"was started with --nnodes 2, .* with 3")],
)
def test_a_mistake_ends_all_of_them(begin, port, others, text):
    calls = [begin(3, 0, port), *(begin(nodes, rank, port) for nodes, rank in others)]
    for call in calls:
        with pytest.raises(ConfigError, match=text):
            call.result(60)


def test_two_that_take_themselves_for_the_first(monkeypatch, capfd):
    """Each listens on its own machine; here these are two addresses of one."""
    first, second = (RollCall.__new__(RollCall) for _ in range(2))
    calls = []
    with ThreadPoolExecutor(2) as pool, socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(RollCall, "_listen", lambda self: server if self is first else other)
        with socket.create_server(("127.0.0.2", port)) as other:
            calls = [pool.submit(call.__init__, 2, 0, "127.0.0.1", port) for call in (first, second)]
            for call in calls:
                with pytest.raises(ConfigError, match="both have --node-rank 0"):
                    call.result(60)


def test_another_program_has_the_port(begin, port, monkeypatch):
    monkeypatch.setattr(roll_call, "HEARD", 0.3)
    with socket.create_server(("", port)) as other:
        with pytest.raises(ConfigError, match=f"MASTER_PORT={port} cannot be used .*\n.*--master-port"):
            begin(2, 0, port).result(60)
        for answers in (False, True):
            call = begin(2, 1, port)
            connection = other.accept()[0]
            if answers:
                connection.close()
            with pytest.raises(ShardproofError, match=r"not from a launcher that waits for machines: .*another job"):
                call.result(60)


def test_strangers_are_not_taken_for_machines(begin, port):
    call = begin(2, 0, port)
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"rank": 1}\n', b""):
        while True:
            try:
                with socket.create_connection(("localhost", port)) as stranger:
                    stranger.sendall(text)
                break
            except ConnectionRefusedError:
                continue
    begin(2, 1, port)
    assert len(call.result(60).hosts) == 2


def test_a_launcher_that_is_gone_is_told_to_all(begin, port):
    met = [call.result(60) for call in [begin(3, rank, port) for rank in range(3)]]
    lost, heard = threading.Barrier(3), []

    def hear(host: str) -> None:
        heard.append(host)
        lost.wait(60)

    for call in met[:2]:
        call.watch(hear)
    met[2]._lines[0].close()
    lost.wait(60)
    assert heard == [socket.gethostname()] * 2


def test_one_that_ends_as_it_should_is_not(begin, port):
    first, second = [call.result(60) for call in (begin(2, 0, port), begin(2, 1, port))]
    heard: list[str] = []
    second.close()
    first._watch(heard.append)  # returns
    assert heard == []
