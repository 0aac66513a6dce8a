"""Resident memory of this process."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path


def status(field: str) -> int:
    """A figure of the system's, in bytes: `VmRSS`, or its peak, `VmHWM`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10


def begin_anew() -> int:
    """The peak begins anew. Returns what is resident now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests freed would be used again, and not seen to grow
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")
