"""Imports that take seconds, for the server from which the processes of cases are forked."""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings


def preload() -> None:
    """Import everything but the peers that are separate packages: those are imported in their own processes."""
    for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"):
        importlib.import_module(name)
    from shardproof.casebook import models
    from shardproof.casebook.case import all_cases

    all_cases()
    with contextlib.suppress(ModuleNotFoundError):
        models.with_lora(models.qwen())


# transformers reads them when it is imported: cases download nothing, its advice is not a result, and killed processes
# would leave the locks of its progress bars behind, which Python reports at exit.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
warnings.simplefilter("ignore")
preload()
