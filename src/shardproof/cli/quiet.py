"""Environment and logging of the libraries below: silences messages that a user can do nothing about."""

from __future__ import annotations

import logging
import os
import warnings

BARS = ("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")


def before_imports(local: bool, verbose: bool) -> None:
    """Settings that libraries read while they are imported. Variables that the user has set are kept."""
    if local:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if not verbose:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if local or os.environ.get("LOCAL_RANK", "0") != "0":  # otherwise one process shows download progress
            for name in BARS:
                os.environ.setdefault(name, "1")
        warnings.simplefilter("ignore")


def after_imports(verbose: bool) -> None:
    """Settings made through the libraries' own functions."""
    if verbose:
        return
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in ("accelerate", "datasets", "peft", "torch", "httpx", "trl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # If DeepSpeed is installed, saving a model imports it, which sets its own log level.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
