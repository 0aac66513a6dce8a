"""What starts ms-swift's processes in a script: torchrun, accelerate or DeepSpeed, and accelerate's file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SCRIPT = re.compile(r"(?:.*/)?swift/cli/(\w+)\.py|swift\.cli\.(\w+)")  # also after -m

_GPUS = "CUDA_VISIBLE_DEVICES"
# Options of torchrun, accelerate and DeepSpeed for settings that the commands read from variables.
_VARIABLES = {
    "nproc_per_node": "NPROC_PER_NODE",
    "num_gpus": "NPROC_PER_NODE",
    "nnodes": "NNODES",
    "num_nodes": "NNODES",
    "node_rank": "NODE_RANK",
    "num_machines": "NNODES",
    "machine_rank": "NODE_RANK",
    "master_addr": "MASTER_ADDR",
    "main_process_ip": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "main_process_port": "MASTER_PORT",
    "gpu_ids": _GPUS,
}
_ALL, _MACHINES, _HERE = "num_processes", "num_machines", "NPROC_PER_NODE"
_AS_MANY = "it starts a process per GPU. Here --nproc sets the number, and the default is one."
_STAGES = {"SHARD_GRAD_OP": "2", "2": "2", "NO_SHARD": "0", "3": "0"}  # FSDP's strategies, by name and by number


@dataclass
class Launched:
    """The settings in the words before an ms-swift command.

    Attributes:
        variables: the equivalent variables of the command.
        options: the equivalent options here.
        missing: settings without an equivalent here.
    """

    variables: dict[str, str] = field(default_factory=dict)
    options: list[tuple[str, list[str]]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def command_at(words: list[str], i: int) -> tuple[str, int] | None:
    """The ms-swift command that begins at this word, and where its options begin."""
    if words[i] == "swift":
        return (words[i + 1], i + 2) if i + 1 < len(words) else None
    found = _SCRIPT.fullmatch(words[i])
    return (found[1] or found[2], i + 1) if found else None


def launched(words: list[str]) -> Launched:
    """The settings of a launcher, from the words before a command."""
    found, said = Launched(), _options(words)
    if said.get("gpu_ids") == "all":
        del said["gpu_ids"]
    if "accelerate" in map(_name, words):
        said = _by_accelerate(said, found)
    elif "deepspeed" in map(_name, words):
        _by_deepspeed(said, found)
    if "max_restarts" in said:
        found.options.append(("max_restarts", [said["max_restarts"]]))
    host, _, port = said.get("rdzv_endpoint", "").partition(":")
    said = {name: at for name, at in (("master_addr", host), ("master_port", port)) if at} | said
    if (hosts := said.get("hostfile")) is not None:
        found.missing.append(
            f"--hostfile {hosts}: DeepSpeed's launcher starts all machines; here each is started separately, with "
            "--nnodes, --node-rank and --master-addr, or by 'shardproof submit'."
        )
    machines = said.get(_MACHINES, "1")
    if _ALL in said and said[_ALL].isdigit() and machines.isdigit() and int(machines):
        found.variables[_HERE] = str(int(said[_ALL]) // int(machines))
    found.variables |= {_VARIABLES[name]: value for name, value in said.items() if name in _VARIABLES}
    if found.variables.get("NNODES") == "1":
        for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
            found.variables.pop(name, None)
    return found


def _name(word: str) -> str:
    return word.rpartition("/")[2]


def _by_deepspeed(said: dict[str, str], found: Launched) -> None:
    """Which GPUs of this machine DeepSpeed's launcher is to use."""
    if match := re.fullmatch(r"localhost:([\d,]+)", said.get("include", "")):
        found.variables |= {_GPUS: match[1], _HERE: str(len(match[1].split(",")))}
        return
    for name in ("include", "exclude"):
        if name in said:
            found.missing.append(f"--{name} {said[name]}: {_GPUS} restricts a machine to some of its GPUs.")
    if not {"num_gpus", "hostfile", "include"} & set(said):
        found.missing.append(f"deepspeed without --num_gpus: {_AS_MANY}")


def _by_accelerate(said: dict[str, str], found: Launched) -> dict[str, str]:
    """accelerate's settings, from the words and a file; the words take precedence."""
    if (file := said.pop("config_file", None)) is not None:
        config = _of_file(file, found)
    else:
        config = {}
        if _ALL not in said:
            found.missing.append(f"accelerate launch without --num_processes: {_AS_MANY}")
    kind = "FSDP" if "use_fsdp" in said else "DEEPSPEED" if "use_deepspeed" in said else config.get("distributed_type")
    if kind == "FSDP":
        found.options += _of_fsdp({**(config.get("fsdp_config") or {}), **said})
    elif kind == "DEEPSPEED" or config.get("deepspeed_config"):
        found.options += _of_zero({**(config.get("deepspeed_config") or {}), **said})
    return {name: str(config[name]) for name in (_ALL, *_VARIABLES) if config.get(name) is not None} | said


def _options(words: list[str]) -> dict[str, str]:
    """Each option of a launcher with its value, by names with underscores."""
    found = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            name, is_given, value = word[2:].partition("=")
            follows = words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("-") else ""
            found[name.replace("-", "_")] = value if is_given else follows
    return found


def _of_file(file: str, found: Launched) -> dict[str, Any]:
    """The settings in accelerate's file."""
    import yaml

    try:
        said: Any = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        said = None
    if isinstance(said, dict):
        return said
    found.missing.append(
        f"--config_file {file}: it cannot be read. Give its number of processes and its sharding as --nproc and "
        "--stage."
    )
    return {}


def _of_zero(config: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    if file := config.get("deepspeed_config_file"):
        return [("deepspeed", [str(file)])]
    kept = [name for name in ("param", "optimizer") if config.get(f"offload_{name}_device") in ("cpu", "nvme")]
    offload = [("offload", ["all" if "param" in kept else "optimizer"])] if kept else []
    return [("stage", [str(config.get("zero_stage", 2))]), *offload]  # accelerate's default


def _of_fsdp(config: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    strategy = str(config.get("fsdp_sharding_strategy", "")).upper()
    kept = str(config.get("fsdp_reshard_after_forward", "")).upper() in ("FALSE", "SHARD_GRAD_OP")
    stage = "2" if kept else _STAGES.get(strategy, "3")
    offloads = str(config.get("fsdp_offload_params", "")).lower() == "true"
    return [("stage", [stage]), *([("offload", ["all"])] if offloads else [])]
