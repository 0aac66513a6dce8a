"""`--launcher ray`: Ray Train places the processes on its cluster, and each runs the command as a rank.

TorchTrainer provides the workers, their ranks and the rendezvous address. In each worker the command runs in a separate
process: Ray calls the training function in a thread, and a command handles signals.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardproof.cli.main import FAILURE
from shardproof.errors import ConfigError
from shardproof.train.options.config import RunConfig

CODE = "code"  # a file with the exit code, in the folder of Ray's results


def launch(config: RunConfig, argv: Sequence[str]) -> int:
    """Run our command `argv` on --nproc workers; returns the exit code.

    Raises:
        ConfigError: Ray is not installed, cannot start so many workers, or an option asks for another launcher.
    """
    _check(config)
    try:
        import ray
        from ray import train
        from ray.train.torch import TorchConfig, TorchTrainer
    except ModuleNotFoundError as error:
        raise ConfigError(f"--launcher ray: {error.name} is missing. pip install 'shardproof[ray]'") from error
    own = not ray.is_initialized()
    if own:
        ray.init(logging_level=logging.ERROR)
    try:
        there = ray.cluster_resources()
        gpus = there.get("GPU", 0) > 0
        kind = "GPU" if gpus else "CPU"
        if there.get(kind, 0) < config.nproc:
            raise ConfigError(
                f"--launcher ray --nproc {config.nproc}: the cluster has only {there.get(kind, 0):.0f} {kind}s. The "
                "run would wait for workers forever."
            )
        place = Path(str(config.output_dir)).expanduser().absolute()
        results = place.with_name(f"{place.name}.ray")
        results.mkdir(parents=True, exist_ok=True)
        trainer = TorchTrainer(
            _rank,
            train_loop_config={"argv": list(argv), "folder": os.getcwd(), "results": str(results)},
            torch_config=TorchConfig(backend="gloo"),  # Ray's own group, which uses no GPU memory
            scaling_config=train.ScalingConfig(num_workers=config.nproc, use_gpu=gpus),
            run_config=train.RunConfig(storage_path=str(results.parent), name=results.name),
        )
        try:
            trainer.fit()
        except Exception as error:  # whatever Ray raises for a lost worker
            print(f"error: Ray could not run the workers to completion: {error}", file=sys.stderr)
            return FAILURE
        code = int((results / CODE).read_text())
        shutil.rmtree(results, ignore_errors=True)
        return code
    finally:
        if own:
            ray.shutdown()


def _check(config: RunConfig) -> None:
    if config.output_dir is None:
        raise ConfigError("--launcher ray needs --output-dir: a folder that all nodes of the cluster share.")
    if config.max_restarts:
        raise ConfigError("--launcher ray and --max-restarts: run the command again with --resume auto instead.")
    if (config.nnodes or os.environ.get("NNODES", "1")) != "1":
        raise ConfigError("--launcher ray and NNODES: Ray knows its nodes; --nproc is the total number of processes.")


def _rank(job: dict[str, Any]) -> None:
    """The work of a Ray worker."""
    import torch.distributed as dist

    box = [_free_port() if dist.get_rank() == 0 else 0]  # MASTER_PORT is taken by Ray's own group
    dist.broadcast_object_list(box)
    command = [sys.executable, "-m", "shardproof", *job["argv"]]
    environment = {**os.environ, "MASTER_PORT": str(box[0])}
    with contextlib.suppress(FileNotFoundError):  # a folder that exists only on the machine of the command
        os.chdir(job["folder"])
    codes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(codes, subprocess.run(command, env=environment).returncode)
    if dist.get_rank() == 0:  # Ray passes on only what is reported with a Ray checkpoint
        Path(job["results"], CODE).write_text(str(max(abs(code) for code in codes)))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
