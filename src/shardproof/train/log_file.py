"""A file of JSON lines that a run adds to while it trains."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("shardproof")


class LogFile:
    """What cannot be written is kept, and written with the next: a disk that is full for a while ends no run, as it
    does not where a checkpoint is saved."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unwritten: list[bytes] = []  # for which there was no room

    def add(self, *records: Mapping[str, Any]) -> None:
        """Add records, a line each."""
        waits = bool(self._unwritten)
        # Half of a pair of UTF-16 is no UTF-8, and as an escape it is JSON.
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        self._unwritten += [line.encode("utf-8", "backslashreplace") for line in lines]
        data = b"".join(self._unwritten)
        try:
            with self.path.open("ab", buffering=0) as file:
                before = os.fstat(file.fileno()).st_size
                if file.write(data) < len(data):
                    file.truncate(before)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not waits:
                said = "%s cannot be written (%s): what is logged waits until it can"
                log.warning(said, self.path, error.strerror or error)
            return
        self._unwritten.clear()
