"""Serve the page of running runs to a browser on this machine."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from shardproof.report.html import data_of, in_script, page_of, version_now

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


class PageServer(ThreadingHTTPServer):
    """Serves `/`, the page, and `/data.json`, its data, or 304 if it is still at `?version=`.

    Args:
        folders: the folders of the runs.
        host, port: where to listen; port 0 takes a free one.
        anybody: also answer requests that do not address this machine by a loopback name. Otherwise they are refused,
            since another site may make its own name point here.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], host: str, port: int, anybody: bool = False) -> None:
        self.folders, self.anybody = list(folders), anybody
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._lock, self._known = threading.Lock(), dict[str, Any]()
        super().__init__((host, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that disconnects early."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}/" if ":" in str(host) else f"http://{host!s}:{port}/"

    def data(self) -> dict[str, Any]:
        """The data, read again only when a file has changed."""
        with self._lock:
            if not self._known or self._known["version"] != version_now(self.folders):
                self._known = data_of(self.folders, live=True)
            return self._known


class _Handler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        host = self.headers.get("Host", "").rsplit(":", 1)[0] if "]" not in self.headers.get("Host", "") else "[::1]"
        if not self.server.anybody and host not in LOOPBACK:
            self._answer(403, "text/plain", "This page is only available on the machine that serves it.\n")
        elif asked.path == "/":
            self._answer(200, "text/html", page_of(self.server.data()))
        elif asked.path == "/data.json":
            data = self.server.data()
            if parse_qs(asked.query).get("version") == [data["version"]]:
                self._answer(304, "application/json", "")
            else:
                self._answer(200, "application/json", in_script(data))
        else:
            self._answer(404, "text/plain", "Only / and /data.json exist.\n")

    def _answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if code != 304:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""
