"""A file of JSON lines that a run appends to during training."""

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
    """Records that cannot be written are kept, and written with the next ones: a disk that is full for a while does not
    end a run, as with checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unwritten: list[bytes] = []  # lines for which there was no room

    def add(self, *records: Mapping[str, Any]) -> None:
        """Append records, one per line."""
        waits = bool(self._unwritten)
        # A lone UTF-16 surrogate cannot be encoded as UTF-8, but its escape is valid JSON.
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
                said = "%s cannot be written (%s): log records are kept until it can"
                log.warning(said, self.path, error.strerror or error)
            return
        self._unwritten.clear()
