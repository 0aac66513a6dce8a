"""`shardproof submit slurm|k8s -- COMMAND`: what a cluster wants to be told to run a command of ours on its nodes.

It writes a file and starts nothing. We have no scheduler of our own: Slurm's `srun` starts the command on each node,
and Kubeflow Trainer's operator does the same from a `TrainJob`.
"""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from shardproof.cli import options
from shardproof.errors import ConfigError
from shardproof.train.options.option import option

TARGETS = ("slurm", "k8s")
COMMANDS = ("sft", "rlhf")
OF_K8S = ("image", "namespace", "runtime", "volume", "secret_env")
OF_SLURM = ("partition", "account", "time", "setup", "slurm")
OF_NODES: dict[str, Any] = {"offload": None, "new_special_tokens": []}  # a folder and a file that nodes may have alone
USAGE = "shardproof submit slurm|k8s [options] -- sft|rlhf [run.yaml] [options of the command]"
DESCRIPTION = """Write the batch script (slurm) or the TrainJob (k8s) that runs a command of ours on several nodes.
Without --output it is printed. Nothing is started: 'sbatch FILE' or 'kubectl create -f FILE' does that."""


class SubmitConfig(BaseModel):
    """The options of `shardproof submit`."""

    model_config = ConfigDict(extra="forbid")

    nodes: int = option("Job", 1, "nodes", ge=1)
    nproc: int = option("Job", 1, "processes, each with a GPU, on each node", ge=1)
    gpus: int | None = option("Job", None, "GPUs of each node (default: one for each process); 0: none", ge=0)
    cpus: int | None = option("Job", None, "CPU cores of each node (default: as the cluster has it)", ge=1)
    memory: str | None = option("Job", None, "memory of each node, as the cluster writes it: 512G, 512Gi")
    name: str = option("Job", "shardproof", "name of the job")
    env: dict[str, str] = option("Job", {}, "environment variables of the job")
    output: str | None = option("Job", None, "write to this file")

    time: str | None = option("Slurm", None, "time limit, as Slurm writes it: 12:00:00")
    partition: str | None = option("Slurm", None, "partition")
    account: str | None = option("Slurm", None, "account")
    setup: list[str] = option("Slurm", [], "lines that run first on the first node: 'source .venv/bin/activate'")
    slurm: list[str] = option("Slurm", [], "further options of sbatch: --slurm=--exclusive")

    image: str | None = option("Kubernetes", None, "container image that has shardproof (default: the runtime's)")
    namespace: str | None = option("Kubernetes", None, "namespace of the job")
    runtime: str = option("Kubernetes", "torch-distributed", "ClusterTrainingRuntime, with Trainer's torch plugin")
    volume: dict[str, str] = option("Kubernetes", {}, "persistent volume claims and where they are: data=/data")
    secret_env: dict[str, str] = option("Kubernetes", {}, "variables from secrets: HF_TOKEN=hub/token")
    debug: bool = option("Job", False, "show tracebacks")


def parser() -> options.Parser:
    """The option table of the command."""
    made = options.parser_for(SubmitConfig, "shardproof submit", USAGE, DESCRIPTION)
    made.add_argument("target", metavar="|".join(TARGETS), help="what starts the job")
    return made


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    words = list(argv)
    if "--" not in words:
        if {"-h", "--help"} & set(words):
            options.parse(parser(), words)
        raise ConfigError(f"Write the command after a separate '--':\n  {USAGE}")
    mine, command = words[: words.index("--")], words[words.index("--") + 1 :]
    found = options.parse(parser(), mine)
    target = found.pop("target")
    if target not in TARGETS:
        raise ConfigError(f"Nothing can be written for {target!r}. There is {' and '.join(TARGETS)}.")
    config = options.build(SubmitConfig, found)
    for name in OF_K8S if target == "slurm" else OF_SLURM:
        if name in found:
            raise ConfigError(f"{options.flag(name)} is not for {target}.")
    for name in (*config.env, *config.secret_env):
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ConfigError(f"{name} is not a variable name: use only letters, digits and underscores.")
    if "\n" in "".join([config.name, *config.slurm]):
        raise ConfigError("--name and --slurm must not contain line breaks.")
    restarts = check_command(command, config)
    text = batch_script(config, command) if target == "slurm" else train_job(config, command, restarts)
    if config.output is None:
        print(text, end="")
        return 0
    try:
        Path(config.output).expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {config.output} cannot be written: {error.strerror}.") from error
    start = "sbatch" if target == "slurm" else "kubectl create -f"
    print(f"written: {config.output}\nstart it: {start} {shlex.quote(config.output)}", file=sys.stderr)
    return 0


def check_command(command: Sequence[str], config: SubmitConfig) -> int:
    """Read the command as the nodes will; only they can check whether its files exist. Returns its --max-restarts.

    Raises:
        ConfigError: it is not a training command, its options are wrong, or its rows cannot be distributed.
    """
    if not command or command[0] not in COMMANDS:
        raise ConfigError(f"The nodes can run {' or '.join(COMMANDS)}, not {(*command, 'nothing')[0]!r}.")
    from shardproof.cli.training import parse
    from shardproof.train.checks.contradictions import check_together
    from shardproof.train.checks.named import check_named
    from shardproof.train.options.config import SftConfig
    from shardproof.train.options.rlhf_config import RlhfConfig

    module = importlib.import_module(f"shardproof.cli.{command[0]}")
    read, given = parse(SftConfig if command[0] == "sft" else RlhfConfig, str(module.__doc__), command[1:])
    on_line = any(word.partition("=")[0] == "--nproc" for word in options.hyphenated(command))
    if on_line or ("nproc" in given and read.nproc != config.nproc):
        raise ConfigError(
            f"--nproc is the number of processes per node: give it to submit, before the command: --nproc {read.nproc}"
        )
    nodes = (read.nnodes or str(config.nodes)).rpartition(":")[2]
    told = [name for name in ("node_rank", "master_addr", "master_port") if getattr(read, name) is not None]
    for name in ["nnodes"] * (nodes != str(config.nodes)) + told:
        raise ConfigError(
            f"{options.flag(name)} {getattr(read, name)} in the command: the job tells each node its rank, the number "
            f"of nodes (--nodes {config.nodes}) and their address. Leave it out."
        )
    if read.resume is None:
        check_named(read)
    check_together(read.model_copy(update=OF_NODES))
    read.batch(config.nodes * config.nproc)
    if read.output_dir is None:
        raise ConfigError("--output-dir is missing: all nodes write into one folder, on a shared file system.")
    return read.max_restarts


def batch_script(config: SubmitConfig, command: Sequence[str]) -> str:
    """A script for sbatch: one task per node, which starts the node's processes."""
    asked = {
        "job-name": config.name,
        "nodes": config.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": config.nproc if config.gpus is None else config.gpus or None,
        "cpus-per-task": config.cpus,
        "mem": config.memory,
        "time": config.time,
        "partition": config.partition,
        "account": config.account,
        "output": "%x-%j.log",
    }
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in asked.items() if value is not None]
    lines += [f"#SBATCH {option}" for option in config.slurm]
    lines += ["set -eo pipefail", "", *config.setup, "set -u"]  # activating environments reads unset variables
    lines += [f"export {name}={shlex.quote(value)}" for name, value in config.env.items()]
    told = [
        'export NNODES="$SLURM_JOB_NUM_NODES"',
        'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        'export MASTER_PORT="$((20000 + SLURM_JOB_ID % 20000))"',
    ]
    each = f'NODE_RANK="$SLURM_NODEID" exec {shlex.join(["shardproof", *command, "--nproc", str(config.nproc)])}'
    # Since 22.05 srun does not inherit the number of cores from sbatch: a task would have one.
    cores = "" if config.cpus is None else f" --cpus-per-task={config.cpus}"
    return "\n".join([*lines, *told, "", f"srun --kill-on-bad-exit=1{cores} bash -c {shlex.quote(each)}", ""])


def train_job(config: SubmitConfig, command: Sequence[str], restarts: int = 0) -> str:
    """A TrainJob of Kubeflow Trainer (trainer.kubeflow.org/v1alpha1), as YAML.

    Its torch plugin tells torchrun in PET_ variables where the nodes are. By default torchrun performs one rendezvous
    there: if it is to restart ranks, it has to be told how to meet again.
    """
    import yaml

    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", config.name):
        raise ConfigError(f"--name {config.name}: use lower-case letters, digits and hyphens, a letter first.")
    meeting = "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"
    again = [f"--max-restarts={restarts}", "--rdzv-backend=c10d", f"--rdzv-endpoint={meeting}"]
    gpus = config.nproc if config.gpus is None else config.gpus
    wanted = {"nvidia.com/gpu": gpus or None, "cpu": config.cpus, "memory": config.memory}
    resources = {name: str(value) for name, value in wanted.items() if value is not None}
    trainer: dict[str, Any] = {
        "image": config.image,
        "command": ["torchrun", *(again if restarts else []), "-m", "shardproof"],
        "args": [_literal(word) for word in command],
        "numNodes": config.nodes,
        "numProcPerNode": config.nproc,
        "resourcesPerNode": {"requests": resources, "limits": resources} if resources else None,
        "env": [{"name": name, "value": _literal(value)} for name, value in config.env.items()]
        + [_from_secret(name, source) for name, source in config.secret_env.items()],
    }
    spec: dict[str, Any] = {
        "runtimeRef": {"name": config.runtime},
        "trainer": {name: value for name, value in trainer.items() if value},
    }
    if config.volume:
        spec["runtimePatches"] = [_volumes(config.volume)]
    metadata = {"name": config.name} | ({"namespace": config.namespace} if config.namespace else {})
    job = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": metadata, "spec": spec}
    dumper = type("Plain", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})
    return str(yaml.dump(job, Dumper=dumper, sort_keys=False, allow_unicode=True))


def _literal(word: str) -> str:
    """Escape a word: Kubernetes replaces `$(NAME)` by the value of a variable, and two dollars by one."""
    return re.sub(r"\$(?=[$(])", "$$", word)


def _from_secret(name: str, source: str) -> dict[str, Any]:
    secret, slash, key = source.partition("/")
    if not (slash and secret and key):
        raise ConfigError(f"--secret-env {name}={source}: name the secret and its key, as in HF_TOKEN=hub/token.")
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _volumes(claims: dict[str, str]) -> dict[str, Any]:
    """A patch for the runtime's pods: `node` is the torch runtime's name for its job and its container."""
    for claim, path in claims.items():
        if not path.startswith("/"):
            raise ConfigError(f"--volume {claim}={path}: the path in the container must begin with a slash.")
    volumes = [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in claims]
    mounts = [{"name": claim, "mountPath": path} for claim, path in claims.items()]
    pods = {"volumes": volumes, "containers": [{"name": "node", "volumeMounts": mounts}]}
    jobs = [{"name": "node", "template": {"spec": {"template": {"spec": pods}}}}]
    return {"manager": "shardproof.dev/submit", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
