"""A script for DeepSpeed, run with one import changed, gives the numbers of one plain process at every stage."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integrations.deepspeed.plain import configuration, train

SCRIPT = Path(__file__).with_name("script.py")
IMPORT, OURS = "import deepspeed\n", "import shardproof.integrations.deepspeed as deepspeed\n"


def run_script(argv: list[str], ours: bool = True) -> None:
    """On a rank of the pool: the script, as `python script.py ARGV` would run it."""
    text = SCRIPT.read_text()
    assert text.count(IMPORT) == 1
    before = sys.argv
    sys.argv = [str(SCRIPT), *argv]
    try:
        exec(compile(text.replace(IMPORT, OURS) if ours else text, str(SCRIPT), "exec"), {"__name__": "__main__"})
    finally:
        sys.argv = before


def start(folder: Path, stage: int, **changes: Any) -> list[str]:
    file = folder / "ds_config.json"
    file.write_text(json.dumps(configuration(stage) | changes))
    return ["--deepspeed_config", str(file), "--folder", str(folder)]


def close(got: list[float], expected: list[float], tolerance: float) -> None:
    assert got == pytest.approx(expected, abs=tolerance, rel=tolerance)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_script_equals_one_process(run2, tmp_path: Path, stage: int) -> None:
    """Accumulation, clipping, the schedule, and an initialisation inside GatheredParameters."""
    run2(run_script, start(tmp_path, stage))
    record, expected = json.loads((tmp_path / "record.json").read_text()), train()
    close(record["losses"], expected["losses"], 1e-6)
    close(record["norms"], expected["norms"], 1e-6)
    close(record["rates"], expected["rates"], 1e-12)
    assert record["steps"] == 6


@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_goes_on_where_it_was_saved(run2, tmp_path: Path, stage: int) -> None:
    argv = start(tmp_path, stage)
    run2(run_script, [*argv, "--stop_after", "3", "--save"])
    run2(run_script, [*argv, "--resume"])
    record, expected = json.loads((tmp_path / "resumed.json").read_text()), train()
    close(record["losses"], expected["losses"][6:], 1e-6)
    close(record["norms"], expected["norms"][3:], 1e-6)
    close(record["rates"], expected["rates"][3:], 1e-12)
    assert record["steps"] == 6


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_itself_gives_the_same_losses(tmp_path: Path, stage: int) -> None:
    """The script as it stands, on DeepSpeed."""
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    done = subprocess.run(
        [*command, *start(tmp_path, stage)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    record, expected = json.loads((tmp_path / "record.json").read_text()), train()
    close(record["losses"], expected["losses"], 1e-5)
    close(record["rates"], expected["rates"], 1e-12)
    if stage:  # at stage 0 it has no norm to tell
        close(record["norms"], expected["norms"], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "variables", "none"])
def test_the_script_is_started_in_several_ways(tmp_path: Path, launcher: str) -> None:
    """By torchrun, by a launcher that sets RANK and its companions (DeepSpeed's own), and as one process."""
    changed = tmp_path / "changed.py"
    changed.write_text(SCRIPT.read_text().replace(IMPORT, OURS))
    argv = [str(changed), *start(tmp_path, 3, train_micro_batch_size_per_gpu="auto")]
    command, ranks, variables = [sys.executable], 1, [{}]
    if launcher == "torchrun":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    elif launcher == "variables":
        ranks = 2
        with socket.socket() as free:
            free.bind(("localhost", 0))
            common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
        variables = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    running = [
        subprocess.Popen([*command, *argv], stderr=subprocess.PIPE, text=True, env=os.environ | added)
        for added in variables
    ]
    for process in running:
        assert process.wait(timeout=300) == 0, process.communicate()[1]
    record, expected = json.loads((tmp_path / "record.json").read_text()), train()
    close(record["losses"], expected["losses"], 1e-6)
    close(record["norms"], expected["norms"], 1e-6)
