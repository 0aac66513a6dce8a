"""Generation with vLLM, as a server or inside each training process: checks before models are loaded."""

from __future__ import annotations

import importlib.util
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from shardproof.errors import ConfigError
from shardproof.models.loading.processors import said_by
from shardproof.train.model.declared import declared
from shardproof.train.model.positions import rotary_positions
from shardproof.train.options.option import flag
from shardproof.train.options.rlhf_config import RlhfConfig

log = logging.getLogger("shardproof")

# Options for a server, and for a colocated vLLM.
SERVED = ("vllm_server", "vllm_server_host", "vllm_server_port", "vllm_server_timeout")
COLOCATED = ("vllm_gpu_memory_utilization", "vllm_max_model_len", "vllm_tensor_parallel_size", "vllm_sleep")

START = """VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}' \
--logprobs-mode processed_logprobs"""
PAUSE = 2.0  # seconds between two attempts
ANSWER = 5.0  # seconds until an attempt has failed


def check_vllm(config: RlhfConfig, world_size: int) -> None:
    """Raise ConfigError for vLLM options that contradict each other or have no effect."""
    given = [name for name in (*SERVED, *COLOCATED, "vllm_mode") if _is_given(config, name)]
    if given and not config.use_vllm:
        what = "a vLLM server" if given[0] in SERVED else "vLLM"
        raise ConfigError(f"{flag(given[0])} applies to {what}, which is not used: add --use-vllm.")
    other, where = (SERVED, "server") if config.vllm_mode == "colocate" else (COLOCATED, "colocate")
    idle = next((name for name in given if name in other), None)
    if idle is not None:
        raise ConfigError(f"{flag(idle)} applies only to --vllm-mode {where}: leave it out.")
    if config.vllm_server and {"vllm_server_host", "vllm_server_port"} & {*given}:
        raise ConfigError("--vllm-server is the whole address: leave out --vllm-server-host and --vllm-server-port.")
    if not config.use_vllm:
        return
    size = config.vllm_tensor_parallel_size
    if world_size % size:
        raise ConfigError(f"--vllm-tensor-parallel-size {size} does not divide {world_size} process(es).")
    if importlib.util.find_spec("vllm") is None:
        does = "each rank generates" if config.vllm_mode == "colocate" else "TRL's client sends weights to the server"
        raise ConfigError(
            f"--use-vllm: the package vllm, with which {does}, is not installed: pip install vllm.\nWithout"
            f" --use-vllm the sharded model generates."
        )


def together_by(config: RlhfConfig) -> str | None:
    """The option that makes all ranks call vLLM at once, and why; None: each rank calls it on its own."""
    if not config.use_vllm:
        return None
    if config.vllm_mode == "server":
        return "--use-vllm: TRL asks the server for all ranks at once"
    if config.vllm_tensor_parallel_size > 1:
        return "--vllm-tensor-parallel-size: processes that share a vLLM call it at once"
    return "--vllm-sleep: vLLM wakes up without weights, which all ranks gather at once" if config.vllm_sleep else None


def vllm_arguments(config: RlhfConfig) -> dict[str, Any]:
    """The arguments of TRL's configuration for generation with vLLM."""
    own: dict[str, Any] = {"use_vllm": True, "vllm_mode": config.vllm_mode}
    if config.vllm_mode == "server":
        return own | {
            "vllm_server_base_url": config.vllm_address,
            "vllm_server_timeout": config.vllm_server_timeout,
        }
    return own | {
        "vllm_gpu_memory_utilization": config.vllm_gpu_memory_utilization,
        "vllm_tensor_parallel_size": config.vllm_tensor_parallel_size,
        "vllm_enable_sleep_mode": config.vllm_sleep,
    }


def of_student(config: RlhfConfig, model_config: Any, at_once: int) -> dict[str, Any]:
    """The arguments of TRL's `VLLMGeneration` if its trainer does not create one; `at_once`: answers per process."""
    colocated = config.vllm_mode == "colocate"
    where: dict[str, Any] = {"server_base_url": config.vllm_address, "server_timeout": config.vllm_server_timeout}
    if colocated:
        where = {
            "gpu_memory_utilization": config.vllm_gpu_memory_utilization,
            "tensor_parallel_size": config.vllm_tensor_parallel_size,
            "enable_sleep_mode": config.vllm_sleep,
            "max_model_length": room_of(config, model_config),
            "max_num_seqs": at_once * config.vllm_tensor_parallel_size,
        }
    how = {"temperature": config.temperature, "max_completion_length": config.max_completion_length, "logprobs": 0}
    return {"mode": config.vllm_mode, **where, **how, "generation_kwargs": vllm_generates((), config.stop_words)}


def vllm_generates(without: Sequence[int], stop: Sequence[str]) -> dict[str, Any]:
    """Arguments that keep vLLM from sampling the tokens `without`, and end answers at the texts `stop`. vLLM has no
    `suppress_tokens`, and limits a bias to 100."""
    return ({"logit_bias": dict.fromkeys(without, -100.0)} if without else {}) | ({"stop": [*stop]} if stop else {})


def room_of(config: RlhfConfig, model_config: Any) -> int:
    """The longest sequence of a colocated vLLM: by default what rows and answers need. It does not start with more than
    the positions in the model's config."""
    if config.vllm_max_model_len:
        return config.vllm_max_model_len
    known = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    needed = config.max_length + config.max_completion_length
    return min(needed, known) if isinstance(known, int) else needed


def check_fits(config: RlhfConfig, rows: Any) -> None:
    """Check that vLLM can be sent weights, and that a colocated one starts and has room for these encoded rows.

    Raises:
        ConfigError: the weights are packed, vLLM would not start, or the longest prompt leaves no room for an answer.
    """
    if config.use_vllm and said_by(config.model, "config.json").get("quantization_config"):
        raise ConfigError(
            f"--use-vllm: {config.model} has packed weights, which vLLM would use, but it is sent unpacked ones."
            f"\nUnpack it first: shardproof export {config.model} FOLDER, and name that folder as --model."
        )
    known = declared(config) if config.use_vllm and config.vllm_mode == "colocate" else None
    if known is None or config.rlhf_type == "gkd":  # in gkd, answers may be the longest part of rows
        return
    said, positions = config.vllm_max_model_len, rotary_positions(known)
    plain = (getattr(known.get_text_config(), "rope_parameters", None) or {}).get("rope_type") == "default"
    if said and positions and plain and said > positions:
        raise ConfigError(
            f"--vllm-max-model-len {said}: {config.model} has {positions} positions, and vLLM does not start with"
            f" more. Leave it out: rows and answers fit."
        )
    longest, room = rows.report.longest_kept, room_of(config, known)
    why = f"--vllm-max-model-len {said}" if said else f"{config.model} has {room} positions"
    if longest >= room:
        raise ConfigError(
            f"{rows.report.longest_at}: the prompt has {longest} tokens, and {why}, so there is no room for an answer."
            f" {'Raise it, or set' if said else 'Set'} --max-length {max(room - 1, 2)} to drop longer"
            f" prompts."
        )
    if longest + config.max_completion_length > room:
        log.warning(
            "%s: vLLM ends answers to the longest prompts (%d tokens, %s) before --max-completion-length %d.",
            *(why, longest, rows.report.longest_at, config.max_completion_length),
        )


def _is_given(config: RlhfConfig, name: str) -> bool:
    return bool(getattr(config, name) != RlhfConfig.model_fields[name].default)


def check_server(config: RlhfConfig) -> None:
    """Raise ConfigError if there is no accelerator to send weights from, or the server is not up in time."""
    from shardproof.zero.device import default_device

    if default_device().type != "cuda":  # ROCm devices have that type too
        raise ConfigError(
            "--use-vllm: weights are sent to the server over NCCL, from GPU to GPU, and there is no GPU"
            " here.\nWithout --use-vllm the sharded model generates."
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
    """Why the server cannot be reached, or an empty string."""
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=ANSWER):
            return ""
    except (OSError, ValueError) as error:  # urllib's errors are OSErrors
        return str(getattr(error, "reason", None) or error)
