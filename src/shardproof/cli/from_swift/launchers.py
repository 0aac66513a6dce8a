"""What starts Swift's processes in a script: torchrun, accelerate or DeepSpeed, and a file of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SCRIPT = re.compile(r"(?:.*/)?swift/cli/(\w+)\.py|swift\.cli\.(\w+)")  # also behind -m

# What torchrun and accelerate call what the commands read from variables.
_VARIABLES = {
    "nproc_per_node": "NPROC_PER_NODE",
    "nnodes": "NNODES",
    "node_rank": "NODE_RANK",
    "num_machines": "NNODES",
    "machine_rank": "NODE_RANK",
    "master_addr": "MASTER_ADDR",
    "main_process_ip": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "main_process_port": "MASTER_PORT",
}
_ALL, _MACHINES, _HERE = "num_processes", "num_machines", "NPROC_PER_NODE"
_STAGES = {"SHARD_GRAD_OP": "2", "2": "2", "NO_SHARD": "0", "3": "0"}  # of FSDP's strategies, by name and by number


@dataclass
class Launched:
    """What words in front of a command of Swift's say.

    Attributes:
        variables: that say the same to the command.
        options: of ours.
        missing: what they say and nothing here does.
    """

    variables: dict[str, str] = field(default_factory=dict)
    options: list[tuple[str, list[str]]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def command_at(words: list[str], i: int) -> tuple[str, int] | None:
    """The command of Swift's that begins at this word, and where its options do."""
    if words[i] == "swift":
        return (words[i + 1], i + 2) if i + 1 < len(words) else None
    found = _SCRIPT.fullmatch(words[i])
    return (found[1] or found[2], i + 1) if found else None


def launched(words: list[str]) -> Launched:
    """What a launcher was told, of the words in front of a command."""
    found, said = Launched(), _options(words)
    if (file := said.pop("config_file", None)) is not None:
        said = _of_file(file, found) | said
    if (hosts := said.get("hostfile")) is not None:
        found.missing.append(
            f"--hostfile {hosts}: DeepSpeed's launcher starts all machines; here each is started: --nnodes,"
            " --node-rank and --master-addr, or 'shardproof submit'."
        )
    machines = said.get(_MACHINES, "1")
    if _ALL in said and said[_ALL].isdigit() and machines.isdigit() and int(machines):
        found.variables[_HERE] = str(int(said[_ALL]) // int(machines))
    found.variables |= {_VARIABLES[name]: value for name, value in said.items() if name in _VARIABLES}
    if found.variables.get("NNODES") == "1":
        for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
            found.variables.pop(name, None)
    return found


def _options(words: list[str]) -> dict[str, str]:
    """Of a launcher, each option with its value, by names with underscores."""
    found = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            name, is_given, value = word[2:].partition("=")
            follows = words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("-") else ""
            found[name.replace("-", "_")] = value if is_given else follows
    return found


def _of_file(file: str, found: Launched) -> dict[str, str]:
    """What a file of accelerate's says, of which `found` takes what is an option here."""
    import yaml

    try:
        said: Any = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        said = None
    if not isinstance(said, dict):
        found.missing.append(
            f"--config_file {file}: it cannot be read. What it says of processes and shards is --nproc and --stage."
        )
        return {}
    fsdp, deepspeed = said.get("fsdp_config") or {}, said.get("deepspeed_config") or {}
    if said.get("distributed_type") == "FSDP":
        found.options += _of_fsdp(fsdp)
    elif deepspeed.get("deepspeed_config_file"):
        found.options.append(("deepspeed", [str(deepspeed["deepspeed_config_file"])]))
    elif "zero_stage" in deepspeed:
        found.options.append(("stage", [str(deepspeed["zero_stage"])]))
        kept = [name for name in ("param", "optimizer") if deepspeed.get(f"offload_{name}_device") in ("cpu", "nvme")]
        found.options += [("offload", ["all" if "param" in kept else "optimizer"])] if kept else []
    return {name: str(said[name]) for name in (_ALL, *_VARIABLES) if said.get(name) is not None}


def _of_fsdp(config: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    strategy = str(config.get("fsdp_sharding_strategy", "")).upper()
    kept = config.get("fsdp_reshard_after_forward") in (False, "false", "SHARD_GRAD_OP")
    stage = "2" if kept else _STAGES.get(strategy, "3")
    return [("stage", [stage]), *([("offload", ["all"])] if config.get("fsdp_offload_params") else [])]
