"""Before the launchers of several machines start ranks, each reports to the first machine.

torch's launchers wait for each other silently for ten minutes, and cannot be interrupted. So they meet here first, at
the same port: missing machines are reported, and a mistake ends all launchers at once. The connections stay open, since
nothing else would notice a machine that is lost before its ranks have met the others.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import socket
import sys
import time
from collections.abc import Callable
from threading import Thread
from typing import Any

from shardproof.errors import ConfigError, ShardproofError

PATIENCE = 8.0  # seconds until a launcher first reports whom it waits for
AGAIN = 60.0
LIMIT = 600.0  # seconds after which it stops waiting
GREETING = 5.0  # seconds within which a caller has to identify itself
HEARD = 15.0  # seconds within which it gets a reply; strangers ahead of it take GREETING each
GREETED = {"rank", "host", "nodes", "token"}  # the keys of a greeting
GRACE = 4.0  # seconds that ranks get to report a lost machine themselves: they know more


class RollCall:
    """Meet the launchers of the other machines.

    Args:
        nodes: how many machines there are.
        rank: the rank of this machine; the first one answers, at `address` and `port`.

    Attributes:
        hosts: the name of each machine.

    Raises:
        ConfigError: two machines have the same rank, their numbers of machines differ, or the port is taken.
        ShardproofError: a machine is missing.
    """

    def __init__(self, nodes: int, rank: int, address: str, port: int) -> None:
        self.nodes, self.rank, self.address, self.port = nodes, rank, address, port
        self.host, self.place = socket.gethostname(), f"{address}:{port}"
        self._lines: dict[int, _Line] = {}
        self._token, self._told = secrets.token_hex(8), ""
        self._said, self._limit = time.monotonic() + PATIENCE, time.monotonic() + LIMIT
        self.hosts: list[str] = self._answer() if rank == 0 else self._call()

    def _answer(self) -> list[str]:
        """The part of the first machine."""
        hosts = {0: self.host}
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_unless_all, hosts)
            server = stack.enter_context(self._listen())
            Thread(target=self._greet_first, args=(hosts,), daemon=True).start()
            while len(hosts) < self.nodes:
                if self._told:
                    raise ConfigError(self._told)
                missing = ", ".join(str(n) for n in range(self.nodes) if n not in hosts)
                self._say(f"no word from --node-rank {missing} of {self.nodes} machines")
                if not select.select([server], [], [], 0.5)[0]:
                    continue
                line = _Line(server.accept()[0])
                caller = line.read(GREETING)
                if not caller.keys() >= GREETED or caller["token"] == self._token:  # a stranger, or this machine itself
                    line.close()
                    continue
                rank, host = caller["rank"], caller["host"]
                problem = self._problem(rank, host, caller["nodes"], hosts)
                if problem:
                    for each in (line, *self._lines.values()):
                        each.write(problem=problem)
                        each.close()
                    raise ConfigError(problem)
                line.write(heard=True)
                hosts[rank], self._lines[rank] = host, line
        found = [hosts[n] for n in range(self.nodes)]
        for line in self._lines.values():
            line.write(hosts=found)
        return found

    def _greet_first(self, hosts: dict[int, str]) -> None:
        """Find out whether another machine at `address` considers itself the first."""
        while len(hosts) < self.nodes:
            with contextlib.suppress(OSError):
                line = _Line(socket.create_connection((self.address, self.port), timeout=2.0))
                self._greet(line)
                self._told = line.read(GREETING).get("problem", "")
                line.close()
                return
            time.sleep(0.5)

    def _greet(self, line: _Line) -> None:
        line.write(rank=self.rank, host=self.host, nodes=self.nodes, token=self._token)

    def _close_unless_all(self, hosts: dict[int, str]) -> None:
        if len(hosts) < self.nodes:
            self.close()

    def _listen(self) -> socket.socket:
        try:
            if socket.has_dualstack_ipv6():
                return socket.create_server(("", self.port), family=socket.AF_INET6, dualstack_ipv6=True)
            return socket.create_server(("", self.port))
        except OSError as error:
            raise ConfigError(
                f"MASTER_PORT={self.port} cannot be used on {self.host} ({error.strerror}): another job or program "
                "uses it.\nChoose another one on all machines: --master-port."
            ) from None

    def _problem(self, rank: int, host: str, nodes: int, hosts: dict[int, str]) -> str:
        if nodes != self.nodes:
            return f"{host} was started with --nnodes {nodes}, {self.host} with {self.nodes}."
        if rank in hosts:
            return f"{hosts[rank]} and {host} both have --node-rank {rank}: each machine needs its own, counted from 0."
        return ""

    def _reach(self) -> _Line:
        while True:
            try:
                return _Line(socket.create_connection((self.address, self.port), timeout=2.0))
            except OSError as error:
                self._say(f"no answer ({error.strerror or error}). Was the machine of --node-rank 0 started?")
                time.sleep(0.5)

    def _call(self) -> list[str]:
        """The part of any other machine."""
        line = self._reach()
        self._greet(line)
        if (answer := line.read(HEARD)).get("heard"):
            while not (answer := line.read(0.5)):
                self._say(f"not all of the {self.nodes} machines have joined")
        if answer.get("problem"):
            raise ConfigError(answer["problem"])
        if "hosts" not in answer:
            raise ShardproofError(
                f"{self.host} got an answer at {self.place}, but not from a launcher that waits for machines: the one "
                "with --node-rank 0 has ended, or another job or program uses the port.\nSee its output, or choose "
                "another --master-port on all machines."
            )
        self._lines[0] = line
        return list(answer["hosts"])

    def _say(self, what: str) -> None:
        now = time.monotonic()
        if now > self._limit:
            raise ShardproofError(f"{self.host} waited {LIMIT:.0f} s for the other machines at {self.place}: {what}.")
        if now > self._said:
            self._said = now + AGAIN
            print(f"{self.host} waits for the other machines at {self.place}: {what}", file=sys.stderr, flush=True)

    def watch(self, lost: Callable[[str], None]) -> None:
        """From now on: `lost` is called with the name of a machine whose launcher has been gone for `GRACE` seconds."""
        Thread(target=self._watch, args=(lost,), daemon=True).start()

    def _watch(self, lost: Callable[[str], None]) -> None:
        open_ones = dict(self._lines)
        while open_ones:
            for rank in [rank for rank, line in open_ones.items() if line.ready(0.5 / len(open_ones))]:
                said = open_ones.pop(rank).read(1.0)
                if said.get("bye"):
                    continue
                host = said.get("gone") or self.hosts[rank]
                for line in open_ones.values():  # machines that do not notice it themselves
                    line.write(gone=host)
                time.sleep(GRACE)
                lost(host)
                return

    def close(self) -> None:
        """Announce that this launcher ends normally."""
        for line in self._lines.values():
            line.write(bye=True)
            line.close()


class _Line:
    """A connection on which each side sends one object per line."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._rest = connection, b""

    def ready(self, seconds: float) -> bool:
        return b"\n" in self._rest or bool(select.select([self._socket], [], [], seconds)[0])

    def read(self, seconds: float) -> dict[str, Any]:
        """An object; empty if none has arrived in time, and {"end": True} if the connection is closed."""
        limit = time.monotonic() + seconds
        try:
            while b"\n" not in self._rest:
                if not self.ready(max(limit - time.monotonic(), 0)):
                    return {}
                data = self._socket.recv(4096)
                if not data or len(self._rest) > 1 << 16:
                    return {"end": True}
                self._rest += data
            text, _, self._rest = self._rest.partition(b"\n")
            found = json.loads(text)
            return found if isinstance(found, dict) else {"end": True}
        except (OSError, ValueError):
            return {"end": True}

    def write(self, **said: Any) -> None:
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(said).encode() + b"\n")

    def close(self) -> None:
        self._socket.close()
