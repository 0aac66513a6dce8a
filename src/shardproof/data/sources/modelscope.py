"""ModelScope's hub: models and datasets named `MS::OWNER/NAME`, fetched and cached by its own client."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal

from shardproof.errors import ConfigError

PREFIX = "MS::"
PATIENCE = 4.0  # seconds to wait for the hub to answer

# Files of a model that transformers does not read, and those with weights.
OTHER_FORMATS = ("*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.ot", "*.tflite", "original/*")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")


def named(text: str) -> str | None:
    """The `OWNER/NAME` of a model or dataset on ModelScope's hub, None for any other name."""
    return text[len(PREFIX) :] if text[: len(PREFIX)].upper() == PREFIX else None


def endpoint() -> str:
    """The hub's URL, from the environment variables that its client reads."""
    said = os.environ.get("MODELSCOPE_ENDPOINT") or os.environ.get("MODELSCOPE_DOMAIN") or "modelscope.cn"
    return said if "://" in said else f"https://{said}"


def fetch(kind: Literal["model", "dataset"], name: str, revision: str | None = None, weights: bool = True) -> Path:
    """The folder of a local copy, updated if the hub answers.

    Raises:
        ConfigError: there is no copy, or the hub's client is not installed.
    """
    from shardproof.data.sources.hub import silence_of

    if name.count("/") != 1:
        raise ConfigError(f"{PREFIX}{name}: names on ModelScope's hub have the form {PREFIX}OWNER/NAME.")
    try:
        from modelscope_hub.compat import snapshot_download
    except ImportError:
        raise ConfigError(
            f"{PREFIX}{name}: ModelScope's hub needs its client: pip install 'shardproof[modelscope]'."
        ) from None
    logging.getLogger("modelscope_hub").setLevel(logging.WARNING)  # its progress bars are enough
    silent = silence_of(endpoint(), PATIENCE)
    left_out = [] if kind == "dataset" else [*OTHER_FORMATS, *(() if weights else WEIGHTS)]
    try:
        return Path(
            snapshot_download(
                name,
                repo_type=kind,
                revision=revision,
                ignore_patterns=left_out,
                local_files_only=silent is not None,
            )
        )
    except Exception as error:  # from the hub, the network, the disk
        if silent is not None:
            raise ConfigError(
                f"There is no copy of the {kind} {PREFIX}{name} on this machine, and ModelScope's hub {endpoint()} "
                f"cannot be reached ({silent})."
            ) from None
        reason = str(error).split("\n", 1)[0] or type(error).__name__
        raise ConfigError(f"ModelScope's hub {endpoint()} has no {kind} {name}: {reason}") from None
