"""`shardproof sft` on several hosts, and what became of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from machines.hosts import Host, Hosts


class Launch:
    """`shardproof sft` on several hosts, with options that every run here has."""

    def __init__(self, model: Path, rows: Path, folder: Path) -> None:
        self.folder = folder
        fixed = "--max-steps 4 --global-batch-size 12 --learning-rate 1e-3 --lr-scheduler constant"
        self.options = ["--model", str(model), "--dataset", str(rows), *fixed.split()]

    def argv(self, out: str, *more: str) -> list[str]:
        given = {word for word in more if word.startswith("--")}
        kept = [
            word
            for option, value in zip(self.options[::2], self.options[1::2], strict=True)
            if option not in given
            for word in (option, value)
        ]
        return [sys.executable, "-m", "shardproof", "sft", *kept, "--output-dir", out, *more]

    def on(self, hosts: Hosts, out: str, *more: str, nodes: str = "") -> None:
        """Begin on all of them."""
        for host in hosts:
            self.one(host, nodes or str(len(hosts)), out, *more)

    def one(self, host: Host, nodes: str, out: str, *more: str) -> None:
        where = ["--nnodes", nodes, "--node-rank", str(host.number), "--master-addr", "node0"]
        host.start(self.argv(out, *more, *where), self.folder)

    def here(self, out: str, *more: str) -> None:
        """The same on this machine, to the end."""
        done = subprocess.run(self.argv(out, *more), cwd=self.folder, timeout=300, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def wait_for_step(self, hosts: Hosts, out: str, step: int) -> None:
        limit = time.monotonic() + 200
        while len(self.log(out)) < step:
            said = "\n".join(f"{host.name}: {host.said(self.folder)}" for host in hosts)
            assert time.monotonic() < limit, said
            assert all(run.poll() is None for host in hosts for run in host.runs), said
            time.sleep(0.05)

    def log(self, out: str) -> list[dict[str, float]]:
        file = self.folder / out / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def losses(self, out: str) -> list[float]:
        return [line["loss"] for line in self.log(out) if "loss" in line]


def ended(hosts: list[Host], folder: Path, within: float = 200.0) -> tuple[list[int], list[str]]:
    """The exit code of the last command of each, and what each has said."""
    limit = time.monotonic() + within
    codes = []
    for host in hosts:
        try:
            codes.append(host.runs[-1].wait(max(limit - time.monotonic(), 0.1)))
        except subprocess.TimeoutExpired:
            codes.append(-1000)  # hangs
    return codes, [host.said(folder) for host in hosts]


def told_within(host: Host, folder: Path, text: str, seconds: float) -> float:
    """Seconds until the host has said `text`."""
    begin = time.monotonic()
    while text not in host.said(folder):
        assert time.monotonic() - begin < seconds + 30, host.said(folder)
        time.sleep(0.05)
    return time.monotonic() - begin
