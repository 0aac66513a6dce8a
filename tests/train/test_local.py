"""Nothing reaches for the network when model and data are local."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Runs a command in a Python that notices, in all of its processes, names looked up and hosts connected to.
WATCHED = """
import os, socket, sys

HERE = {None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname(), socket.getfqdn()}
HERE |= {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}

def watched(function, host_of):
    def call(*args, **kwargs):
        if (host := host_of(*args, **kwargs)) not in HERE:
            os.write(2, f"NETWORK {host}\\n".encode())
        return function(*args, **kwargs)
    return call

socket.getaddrinfo = watched(socket.getaddrinfo, lambda host, *rest, **more: host)
socket.gethostbyname = watched(socket.gethostbyname, lambda host: host)
socket.socket.connect = watched(
    socket.socket.connect, lambda self, address: address[0] if isinstance(address, tuple) else None
)
if sys.argv[1] == "network":
    try:
        socket.create_connection(("192.0.2.1", 9), timeout=0.01)
    except OSError:
        sys.exit()
from shardproof.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def watched(*argv: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", WATCHED, *argv], capture_output=True, text=True, timeout=300, env=environment
    )


def test_the_watch_notices() -> None:
    assert "NETWORK 192.0.2.1" in watched("network").stderr


@pytest.mark.slow
def test_a_run_with_local_model_and_data_asks_nobody(tiny: Path, rows: Path, tmp_path: Path) -> None:
    local = ["--model", str(tiny), "--dataset", str(rows), "--output-dir", str(tmp_path / "out")]
    run = watched("sft", *local, "--tuner", "lora", "--nproc", "2", "--max-steps", "1")
    assert run.returncode == 0, run.stderr
    assert "NETWORK" not in run.stderr
    ask = watched("infer", str(tmp_path / "out"), "--prompt", "what", "--max-new-tokens", "2")
    assert ask.returncode == 0, ask.stderr
    assert "NETWORK" not in ask.stderr
