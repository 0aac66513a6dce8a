"""Promise: `shardproof doctor` on several machines tries the run on all of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_each_machine_takes_part_in_the_trial(tiny, rows, tmp_path):
    """Two of one process each, which are this machine twice. The first speaks for all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def both(*more: str) -> list[tuple[int, str]]:
        options = ["--model", str(tiny), "--dataset", str(rows), "--global-batch-size", "4", "--plan", "no", *more]
        where = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port]
        words = [sys.executable, "-m", "shardproof", "doctor", "--json", *options, *where, "--node-rank"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started = [
            subprocess.Popen([*words, rank], env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE)
            for rank in "01"
        ]
        said = [process.communicate(timeout=300)[0] for process in started]
        return [(process.returncode, text) for process, text in zip(started, said, strict=True)]

    (code, told), (other, nothing) = both("--learning-rate", "1e-3")
    checks = {f"{c['area']}: {c['name']}": c for c in json.loads(told)["checks"]}
    assert (code, other, nothing) == (0, 0, ""), told
    assert "GB/s between them" in checks["trial: ranks"]["evidence"]
    assert checks["trial: loss"]["status"] == "ok"
    assert "1 process(es)" in checks["environment: devices"]["evidence"]  # of this machine

    (code, told), (other, nothing) = both("--freeze", "llm")
    assert (code != 0, other != 0, nothing) == (True, True, "")
    assert [c["name"] for c in json.loads(told)["checks"] if c["status"] == "fail"] == ["parts"]
    assert list(tmp_path.iterdir()) == []
