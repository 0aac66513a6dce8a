"""A process of its own for each measurement, begun in a moment: libraries are imported once."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

IMPORTED = ["transformers.models.qwen2.modeling_qwen2", "peft", "shardproof.zero.api", "torch.distributed.fsdp"]
IMPORTED += ["torch._dynamo", "transformers.trainer", "shardproof.integrations.transformers"]


def in_a_process(function: Callable[..., None], *arguments: Any) -> None:
    """Call `function(0, *arguments)` in a process that no other measurement has used.

    It is forked from one that has imported the libraries and asked nothing of the driver. Where that does not do
    (libraries that look for devices when they are imported), it begins from nothing.

    Raises:
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException: it failed.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # looks for devices without waking the driver
    multiprocessing.set_forkserver_preload(IMPORTED)
    try:
        mp.start_processes(_guarded, (function, *arguments), nprocs=1, start_method="forkserver")
    except mp.ProcessExitedException as problem:
        if problem.exit_code != CANNOT:
            raise
        mp.start_processes(function, arguments, nprocs=1, start_method="spawn")


CANNOT = 77


def _guarded(number: int, function: Callable[..., None], *arguments: Any) -> None:
    try:
        if torch.accelerator.is_available():
            torch.empty(1, device=torch.accelerator.current_accelerator())
    except RuntimeError:
        os._exit(CANNOT)
    function(number, *arguments)
