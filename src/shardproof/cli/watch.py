"""`shardproof watch RUN_DIR`: show a run in the browser while it trains."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from shardproof.cli.options import Parser
from shardproof.cli.report import run_folders
from shardproof.errors import ConfigError

DESCRIPTION = (
    """Serve the page of 'shardproof report' on this machine; it follows the run while it trains. Ctrl-C quits."""
)
PORT = 7007
MOST = 65535


def parser() -> Parser:
    """The option table of the command."""
    made = Parser(
        prog="shardproof watch",
        usage="shardproof watch RUN_DIR [RUN_DIR ...] [--port N]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="the output folder of a run")
    made.add_argument("--port", type=int, metavar="N", help=f"default: {PORT}, or a free one if it is taken")
    made.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="listen here (default: 127.0.0.1)")
    made.add_argument(
        "--anybody", action="store_true", help="answer other machines too: anyone who reaches the port sees the run"
    )
    return made


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    found = parser().parse_args(list(argv))
    folders = run_folders(found.run_dirs)
    from shardproof.report.serve import LOOPBACK

    if found.host not in LOOPBACK and not found.anybody:
        raise ConfigError(
            f"--host {found.host} is open to other machines, and the page shows configuration and samples to anyone "
            "who reaches it.\nAdd --anybody if that is intended, or forward the port: ssh -L 7007:127.0.0.1:7007 HOST"
        )
    server = _server(folders, found.host.strip("[]"), found.port, found.anybody)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
    thread.start()
    print(f"watching {', '.join(map(str, folders))}\n{server.address}   (Ctrl-C quits)", flush=True)
    ended.wait()
    server.shutdown()
    server.server_close()
    if sys.stdout.isatty():
        print()
    return 0


def _server(folders: Any, host: str, port: int | None, anybody: bool) -> Any:
    from shardproof.report.serve import PageServer

    if port is not None and not 0 <= port <= MOST:
        raise ConfigError(f"--port {port} of {host} cannot be used: a port is a number from 0 to {MOST}.")
    try:
        try:
            return PageServer(folders, host, PORT if port is None else port, anybody)
        except OSError:
            if port is not None:
                raise
            return PageServer(folders, host, 0, anybody)
    except OSError as error:
        what = f"--host {host}" if port is None else f"--port {port} of {host}"
        raise ConfigError(f"{what} cannot be used: {error.strerror or error}. Choose another one.") from error
