"""`shardproof watch`: the page of a run that goes on, for this machine only."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from report.browser import needs_chromium, shown
from report.folders import record, run_folder
from shardproof.cli.main import main
from shardproof.report.serve import PageServer


class Growing(PageServer):
    """The run makes a step whenever somebody has looked."""

    def data(self) -> dict[str, Any]:
        found = super().data()
        with (self.folders[0] / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record(found["runs"][0]["last"] + 1)) + "\n")
        return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return run_folder(tmp_path / "run", [record(1), record(2)], ended=False)


@pytest.fixture(params=[PageServer])
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[PageServer]:
    server = request.param([folder], "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def asked(server: PageServer, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_numbers_are_sent_when_they_have_changed(server: PageServer, folder: Path) -> None:
    code, text = asked(server, "/data.json")
    first = json.loads(text)
    assert (code, first["runs"][0]["last"], first["runs"][0]["state"]) == (200, 2, "open")
    assert asked(server, f"/data.json?version={first['version']}") == (304, "")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record(3)) + "\n")
    code, text = asked(server, f"/data.json?version={first['version']}")
    assert (code, json.loads(text)["runs"][0]["last"]) == (200, 3)
    assert asked(server, "/../config.yaml")[0] == 404


def test_other_names_than_those_of_the_loopback_are_refused(server: PageServer) -> None:
    assert [asked(server, "/", host)[0] for host in ("localhost:1", "127.0.0.1", "[::1]:9")] == [200] * 3
    assert [asked(server, "/data.json", host)[0] for host in ("evil.example", "10.0.0.1:80")] == [403] * 2


def test_a_browser_that_has_left_is_no_news(server: PageServer, monkeypatch, capfd) -> None:
    monkeypatch.setattr("shardproof.report.serve.page_of", lambda data: "x" * 20_000_000)  # what no connection holds
    with socket.create_connection(server.server_address[:2]) as browser:
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        browser.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert browser.recv(9) == b"HTTP/1.0 "
    assert asked(server, "/nothing")[0] == 404
    server.shutdown()
    for thread in threading.enumerate():
        if thread.name.startswith("Thread-") and "process_request" in thread.name:
            thread.join(30)
    assert capfd.readouterr().err == ""


@needs_chromium
@pytest.mark.parametrize("server", [Growing], indirect=True)
def test_the_page_follows_the_run(server: PageServer) -> None:
    page = shown(server.address)
    steps = [int(line["data-points"]) for line in page.having("data-line") if line["data-of"] == "loss"]
    assert steps
    assert steps[0] > 2
    assert "live" in page.text


def test_other_machines_only_where_that_is_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(folder), "--host", "0.0.0.0"]) == 2
    assert "--anybody" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, told",
    [
        (["--port", "70000"], "error: --port 70000 of 127.0.0.1 cannot be used: a port is a number from 0 to 65535.\n"),
        (["--host", "203.0.113.7", "--anybody"], "error: --host 203.0.113.7 cannot be used: Cannot assign"),
    ],
)
def test_where_it_cannot_listen_is_told(folder: Path, options: list[str], told: str, capsys) -> None:
    assert main(["watch", str(folder), *options]) == 2
    assert capsys.readouterr().err.startswith(told)


def test_ctrl_c_ends_it_without_a_word(folder: Path) -> None:
    command = [sys.executable, "-m", "shardproof", "watch", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline().startswith("watching")
        address = process.stdout.readline().split()[0]
        host, port = address.removeprefix("http://").rstrip("/").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr
        assert process.stderr.read() == ""
