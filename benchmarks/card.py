"""The accelerator that a benchmark runs on, of whatever kind, or the CPU."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch


def device_here() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def clock() -> float:
    """Seconds, after all queued work is done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def forget_peak() -> None:
    """Make `peak_memory` count from now on; without an accelerator it counts from the start of the process."""
    if torch.accelerator.is_available():
        torch.accelerator.reset_peak_memory_stats()


def matrix_rate(device: torch.device) -> float:
    """Floating-point operations per second in a product of two bf16 matrices: the median of 9 measurements."""
    size, count = (8192, 20) if device.type != "cpu" else (256, 2)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(10):
        begin = clock()
        for _ in range(count):
            a @ b
        times.append((clock() - begin) / count)
    return 2 * size**3 / statistics.median(times[1:])


def limit_memory(device: torch.device, gigabytes: float | None) -> None:
    """Make torch's allocator refuse to exceed this limit."""
    if gigabytes is not None and device.type != "cpu":
        module: Any = torch.get_device_module(device)
        module.set_per_process_memory_fraction(min(1.0, 1e9 * gigabytes / module.mem_get_info()[1]))
