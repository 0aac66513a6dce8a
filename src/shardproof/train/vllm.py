"""Whether a vLLM server can generate for a run: asked before models are loaded."""

from __future__ import annotations

import logging
import time
import urllib.error
import urllib.request

from shardproof.errors import ConfigError
from shardproof.train.rlhf_config import RlhfConfig

log = logging.getLogger("shardproof")

START = """VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}' \
--logprobs-mode processed_logprobs"""
PAUSE = 2.0  # seconds between two questions
ANSWER = 5.0  # seconds until a question counts as not answered


def check_server(config: RlhfConfig) -> None:
    """Raise ConfigError if there is no accelerator to send weights from, or the server is not up in time."""
    from shardproof.zero.device import default_device

    if default_device().type != "cuda":  # ROCm's devices bear that name too
        raise ConfigError(
            "--use-vllm: weights go to the server over NCCL, from GPU to GPU, and there is none here.\n"
            "Without --use-vllm the model itself generates, sharded."
        )
    problem = _problem(config.vllm_address)
    if problem and config.vllm_server_timeout:
        log.warning("Waiting for the vLLM server at %s (%s).", config.vllm_address, problem)
    end = time.monotonic() + config.vllm_server_timeout
    while problem and time.monotonic() < end:
        time.sleep(PAUSE)
        problem = _problem(config.vllm_address)
    if problem:
        raise ConfigError(f"--use-vllm: no vLLM server at {config.vllm_address} ({problem}).\nStart one with: {START}")


def _problem(address: str) -> str:
    """Why the server cannot be asked, or nothing."""
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=ANSWER):
            return ""
    except (OSError, ValueError) as error:  # urllib's errors are OSErrors
        return str(getattr(error, "reason", None) or error)
