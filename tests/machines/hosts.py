"""Machines made of namespaces: each has its own network, name, /etc/hosts, processes and node-local folder.

    with Hosts(2, folder) as hosts:
        run = hosts[1].start(["python", "-c", "..."])
        hosts[0].cut_off()

They hang on a bridge, which lies in a network namespace of its own, so nothing of this machine's network is touched.
Needs Linux, root, iproute2 and util-linux: `reason()` says what is missing.

A host is one process that holds its namespaces; whatever runs there runs below it and ends with it, and that one ends
with the process that made it: nothing is left behind, however a test ends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LOCAL = "local"  # the node-local folder: the same path on every host, another content on each
NETWORK = "10.77.0"
INTERFACE = "eth7"  # a name that nobody's default is


def reason() -> str:
    """Why there can be no hosts here, or nothing."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    for tool in ("ip", "tc", "unshare", "nsenter", "setpriv", "mount"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (iproute2, util-linux)"
    return _attempt()


@functools.cache
def _attempt() -> str:
    script = f"ip link add b0 type bridge && ip link add v0 type veth peer name {INTERFACE} && mount -t tmpfs none /mnt"
    tried = subprocess.run([*_unshare(*NAMESPACES), "sh", "-c", script], capture_output=True, text=True)
    return f"no namespaces, bridge or veth: {tried.stderr.strip()}" if tried.returncode else ""


NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc")


def _unshare(*namespaces: str) -> list[str]:
    """In front of a command: it has these of its own, and ends with this process."""
    return ["setpriv", "--pdeathsig=KILL", "unshare", *namespaces]


def _sh(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


class Host:
    """One of them.

    Attributes:
        name, address: by which the others know it.
        local: its node-local folder, a path that every host has and none shares.
    """

    def __init__(
        self, number: int, switch: list[str], folder: Path, named: Mapping[str, str], loopback_name: bool
    ) -> None:
        self.number, self.switch = number, switch
        self.name, self.address = f"node{number}", f"{NETWORK}.{number + 1}"
        self.local = folder / LOCAL
        self.runs: list[subprocess.Popen[str]] = []
        # As Debian writes it: a machine's own name is 127.0.1.1.
        names = dict(named) | ({self.name: "127.0.1.1"} if loopback_name else {})
        table = folder / f"hosts-{self.name}"
        table.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in names.items()))
        setup = (
            f"hostname {self.name} && mount --make-rprivate / && mount --bind {table} /etc/hosts"
            f" && mount -t tmpfs none {self.local} && mount -t tmpfs none /dev/shm && echo ready && exec sleep infinity"
        )
        words = [*_unshare(*NAMESPACES), "sh", "-c", setup]
        quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._holder: subprocess.Popen[str] = subprocess.Popen(words, text=True, **quiet)
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            raise RuntimeError(f"{self.name} did not start")
        below = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        self.init = int(below[0])  # process 1 of this host
        port = self.port = f"port{number}"
        peer = ["peer", "name", INTERFACE, "netns", str(self.init)]
        _sh(*switch, "ip", "link", "add", port, "type", "veth", *peer)
        _sh(*switch, "ip", "link", "set", port, "master", "bridge", "up")
        for words in (["link", "set", "lo", "up"], ["address", "add", f"{self.address}/24", "dev", INTERFACE]):
            _sh(*self.inside("ip", *words))
        _sh(*self.inside("ip", "link", "set", INTERFACE, "up"))

    def inside(self, *words: str, folder: Path | None = None) -> list[str]:
        """The command that runs `words` on this host."""
        where = [f"--wdns={folder}"] if folder else []
        return ["nsenter", f"--target={self.init}", "--all", *where, *words]

    def start(
        self, words: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command; what it says goes to `folder/NAME.log`."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
        with (folder / f"{self.name}.log").open("a") as log:
            run = subprocess.Popen(
                self.inside(*words, folder=folder), env=environment, stdout=log, stderr=subprocess.STDOUT, text=True
            )
        self.runs.append(run)
        return run

    def said(self, folder: Path) -> str:
        return (folder / f"{self.name}.log").read_text()

    def die(self) -> None:
        """Everything on this host ends at once, as if its memory had run out; its kernel still closes connections."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        for run in self.runs:
            run.wait()

    def cut_off(self) -> None:
        """Its cable is pulled out: nobody hears of it any more, and nothing tells them so."""
        _sh(*self.switch, "ip", "link", "set", self.port, "down")

    def plug_in(self) -> None:
        """The cable is back in."""
        _sh(*self.switch, "ip", "link", "set", self.port, "up")

    def slow_down(self, megabits: float) -> None:
        """What it sends and what it receives goes no faster than that."""
        burst = max(64, round(megabits * 1000 / 8 / 100))  # kB: what goes in 10 ms, for the kernel's clock is coarse
        rate = ["root", "tbf", "rate", f"{megabits}mbit", "burst", f"{burst}kb", "latency", "200ms"]
        _sh(*self.inside("tc", "qdisc", "replace", "dev", INTERFACE, *rate))
        _sh(*self.switch, "tc", "qdisc", "replace", "dev", self.port, *rate)

    def sent(self) -> int:
        """Bytes that have left this host."""
        counter = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
        told = subprocess.run(
            self.inside("sh", "-c", f"mount -t sysfs none /sys && cat {counter}"), capture_output=True, text=True
        )
        return int(told.stdout)

    def sent_again(self) -> int:
        """Bytes of it, at most, that had left before: TCP repeats what a busy machine is late to acknowledge."""
        told = subprocess.run(self.inside("cat", "/proc/net/snmp"), capture_output=True, text=True).stdout
        names, values = (line.split() for line in told.splitlines() if line.startswith("Tcp:"))
        return 1500 * int(values[names.index("RetransSegs")])

    def close(self) -> None:
        self.die()
        self._holder.kill()
        self._holder.wait()


class Hosts(list[Host]):
    """So many hosts on a bridge. They are gone at the end of the block, with all that ran there.

    Args:
        folder: what is written there is seen by all hosts, but for `local` in it.
        loopback_name: each host's own name is 127.0.1.1 to itself, as Debian and Ubuntu write it.
    """

    def __init__(self, count: int, folder: Path, loopback_name: bool = False) -> None:
        super().__init__()
        self.folder, self.count, self.loopback_name = folder, count, loopback_name

    def __enter__(self) -> Hosts:
        (self.folder / LOCAL).mkdir(exist_ok=True)
        named = {f"node{number}": f"{NETWORK}.{number + 1}" for number in range(self.count)}
        script = "ip link add bridge type bridge && ip link set bridge up && echo ready && exec sleep infinity"
        words = [*_unshare("--net"), "sh", "-c", script]
        self._holder = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        try:
            if self._holder.stdout.readline() != "ready\n":
                raise RuntimeError("the bridge was not made")
            switch = ["nsenter", f"--target={self._holder.pid}", "--net"]
            for number in range(self.count):
                self.append(Host(number, switch, self.folder, named, self.loopback_name))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        for host in self:
            host.close()
        self._holder.kill()
        self._holder.wait()
