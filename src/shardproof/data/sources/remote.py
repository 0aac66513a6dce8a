"""Files that rows name by a network address. They are fetched only if the user allows it."""

from __future__ import annotations

import hashlib
import os
import time
from http.client import HTTPException
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from shardproof.data.forms.parts import Problem

SCHEMES = ("http", "https")
CHUNK = 1 << 16


def fetched(address: str, most_bytes: int, seconds: float) -> bytes:
    """The contents of an address.

    Args:
        address: http or https; the same goes for redirects.
        most_bytes: the maximum size of the answer.
        seconds: how long the server may be silent, and how long the content may take.

    Raises:
        Problem: there is no answer in time, it is an error or too long; or the address has another scheme.
    """
    _check(address)
    request = Request(address, headers={"User-Agent": "shardproof", "Accept-Encoding": "identity"})
    try:
        with build_opener(_Redirects).open(request, timeout=seconds) as answer:
            return _read(answer, most_bytes, seconds)
    except HTTPError as error:
        error.close()
        raise Problem(f"the server answers {error.code} {error.reason}") from None
    except TimeoutError:
        raise Problem(_too_slow(seconds)) from None
    except URLError as error:
        late = isinstance(error.reason, TimeoutError)
        raise Problem(_too_slow(seconds) if late else f"it cannot be fetched: {error.reason}") from None
    except (OSError, HTTPException, ValueError) as error:  # a broken connection, answer or address
        raise Problem(f"it cannot be fetched: {error}") from None


def fetched_once(address: str, folder: Path, most_bytes: int, seconds: float) -> bytes:
    """The contents of an address from the cache folder, or, if missing, from `fetched`, which are then stored there.
    Several processes may do so at once: a file in the folder is always complete."""
    path = folder / hashlib.sha256(address.encode()).hexdigest()
    try:
        if path.exists():
            return path.read_bytes()
        folder.mkdir(parents=True, exist_ok=True)
        content = fetched(address, most_bytes, seconds)
        with NamedTemporaryFile(dir=folder, delete=False) as part:
            try:
                part.write(content)
                part.flush()
            except OSError:
                os.unlink(part.name)
                raise
        os.replace(part.name, path)
    except OSError as error:
        raise Problem(f"it cannot be stored in {folder}: {error.strerror or error}") from None
    return content


def _read(answer: Any, most: int, seconds: float) -> bytes:
    end = time.monotonic() + seconds
    told = answer.headers.get("Content-Length", "")
    if told.isdecimal() and int(told) > most:
        raise Problem(_too_long(most))
    content = bytearray()
    while piece := answer.read1(CHUNK):  # returns what has arrived, so that a very slow server is noticed
        content += piece
        if len(content) > most:
            raise Problem(_too_long(most))
        if time.monotonic() > end:
            raise Problem(_too_slow(seconds))
    if told.isdecimal() and len(content) < int(told):
        raise Problem(f"it ends after {len(content)} of {told} bytes")
    return bytes(content)


class _Redirects(HTTPRedirectHandler):
    """Refuses redirects to ftp, which urllib would follow."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check(address: str) -> None:
    kind = urlsplit(address).scheme.lower()
    if kind not in SCHEMES:
        raise Problem(f"an address of kind {kind}; only http and https are fetched")


def _too_long(most: int) -> str:
    return f"it has more than {most:,} bytes"


def _too_slow(seconds: float) -> str:
    return f"it did not arrive within {seconds:g} s"
