"""A run whose processes are killed goes on by itself, with the losses of one that was left alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest
from tests.train.conftest import Run, last_of_each

from shardproof.cli.main import FAILURE
from shardproof.cli.processes import elastic
from shardproof.cli.processes.launch import Ended
from shardproof.train.options.batch import Batch
from shardproof.train.options.config import SftConfig
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.run import Prepared, again

STEPS = 30


@pytest.fixture(scope="module")
def whole(commands, sft):
    """A run that nobody disturbs, and commands that cannot be meant so."""
    fixed = ["--max-steps", str(STEPS), "--save-steps", "2"]
    return commands(
        [
            ("left_alone", sft(*fixed, "--nproc", "2")),
            ("no_checkpoints", sft("--max-restarts", "2")),
            ("no_restarts", sft(*fixed, "--min-processes", "1")),
            ("too_many", sft(*fixed, "--max-restarts", "1", "--min-processes", "3", "--nproc", "2")),
        ]
    )


def kill_after_a_checkpoint(run: subprocess.Popen[str], folder: Path) -> None:
    """SIGKILL the last of its ranks."""
    limit = time.monotonic() + 200
    while not (folder / "checkpoint-4").exists() and run.poll() is None and time.monotonic() < limit:
        time.sleep(0.005)
    os.kill(ranks_of(run)[-1], signal.SIGKILL)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def killed_once(sft: Callable[..., list[str]], folder: Path, *more: str) -> tuple[int, str, list[dict[str, float]]]:
    """SIGKILL one rank after the second checkpoint. Returns exit code, what was said, and the log."""
    argv = [str(folder) if arg == "OUT" else arg for arg in sft("--max-steps", str(STEPS), "--save-steps", "2", *more)]
    command = [sys.executable, "-m", "shardproof", *last_of_each(argv)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0)
    try:
        kill_after_a_checkpoint(run, folder)
        said = run.communicate(timeout=200)[0]
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return run.returncode, said, [json.loads(line) for line in lines]


def check_killed_once(
    launchers: list[subprocess.Popen[str]], files: list[TextIO], victim: int, folder: Path, whole: dict[str, Run]
) -> None:
    """SIGKILL a rank of one of them: all end well, with every step once and the losses of the run left alone."""
    try:
        kill_after_a_checkpoint(launchers[victim], folder)
        codes = [launcher.wait(timeout=200) for launcher in launchers]
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
        for file in files:
            file.close()
    said = "\n".join(Path(file.name).read_text() for file in files)
    assert codes == [0] * len(launchers), said
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == list(range(1, STEPS + 1)), said
    assert [line["loss"] for line in log] == whole["left_alone"].series("loss")


@pytest.mark.slow
def test_the_ranks_are_started_again(whole, sft: Callable[..., list[str]], tmp_path: Path) -> None:
    """As many, by torch's elastic agent: every step is logged once, with the losses of the other run, bit for bit."""
    code, said, log = killed_once(sft, tmp_path / "out", "--nproc", "2", "--max-restarts", "2")
    assert code == 0, said
    assert "restart 1 of 2" in said
    assert "Traceback" not in said
    assert [line["step"] for line in log] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in log] == whole["left_alone"].series("loss")
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_those_that_are_left_go_on(whole, sft: Callable[..., list[str]], tmp_path: Path) -> None:
    """One of two, with the same rows in a step; what sums in another order round grows as training goes on."""
    more = ("--nproc", "2", "--max-restarts", "1", "--min-processes", "1")
    code, said, log = killed_once(sft, tmp_path / "out", *more)
    assert code == 0, said
    assert "restart 1 of 1, on 1 process(es)" in said
    assert [line["step"] for line in log] == list(range(1, STEPS + 1))
    losses, expected = [line["loss"] for line in log], whole["left_alone"].series("loss")
    assert losses[:12] == pytest.approx(expected[:12], rel=1e-6)
    assert losses == pytest.approx(expected, rel=3e-5)
    assert [line["tokens"] for line in log] == whole["left_alone"].series("tokens")


@pytest.mark.slow
@pytest.mark.parametrize("machines", [1, 2])
def test_a_torchrun_of_ones_own_starts_them_again(
    whole, sft: Callable[..., list[str]], tmp_path: Path, machines: int
) -> None:
    """Its agent keeps one store for all ranks that it starts: those of before have left their addresses there."""
    argv = last_of_each(
        [str(tmp_path / "out") if arg == "OUT" else arg for arg in sft("--max-steps", str(STEPS), "--save-steps", "2")]
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    where = ["--standalone"] if machines == 1 else ["--rdzv-backend", "c10d", "--rdzv-endpoint", place]
    where += ["--nnodes", str(machines), "--nproc-per-node", str(2 // machines), "--max-restarts", "2"]
    files = [(tmp_path / f"torchrun{number}.log").open("w+") for number in range(machines)]
    launchers = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *where, "-m", "shardproof", *argv],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        for file in files
    ]
    check_killed_once(launchers, files, -1, tmp_path / "out", whole)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_the_ranks_of_all_machines_are_started_again(
    whole, sft: Callable[..., list[str]], tmp_path: Path, victim: int
) -> None:
    """The only rank of one of two machines is killed: the agents of both start theirs again."""
    more = ["--max-steps", str(STEPS), "--save-steps", "2", "--max-restarts", "2"]
    argv = last_of_each([str(tmp_path / "out") if arg == "OUT" else arg for arg in sft(*more)])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**os.environ, "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    files = [(tmp_path / f"machine{node}.log").open("w+") for node in range(2)]
    machines = [
        subprocess.Popen(
            [sys.executable, "-m", "shardproof", *argv],
            env={**common, "NODE_RANK": str(node)},
            stdout=files[node],
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        for node in range(2)
    ]
    check_killed_once(machines, files, victim, tmp_path / "out", whole)


@pytest.mark.parametrize(("given", "left"), [({}, 3), ({"sequence_parallel": 2}, 2), ({"shard_group": 2}, 2)])
def test_those_that_are_left_go_on_in_whole_groups(given, left: int, tmp_path: Path, monkeypatch) -> None:
    """Of four processes one dies: three cannot share rows, or a copy of the model, in twos."""
    config = SftConfig(nproc=4, global_batch_size=12, save_steps=2, max_restarts=1, min_processes=1, **given)
    prepared = Prepared(config, config.batch(4), tmp_path, "tiny", None, [], None, [])
    begun: list[tuple[int, Batch]] = []

    def run_group(work, args, nproc: int, *_, **__) -> Ended:
        begun.append((nproc, args[0].batch))
        return Ended(0) if len(begun) > 1 else Ended(FAILURE, lost=1)

    monkeypatch.setattr(elastic, "run_group", run_group)
    assert elastic.launch_run(lambda *_: 0, prepared, 4) == 0
    assert [nproc for nproc, _ in begun] == [4, left]
    assert [batch.whole for _, batch in begun] == [12, 12]


def test_that_losses_are_others_on_those_that_are_left_is_told(tmp_path: Path, caplog) -> None:
    """Once, and in the checkpoints that follow."""
    config = RlhfConfig(rlhf_type="kto", nproc=2, save_steps=2, max_restarts=1, min_processes=1)
    prepared = Prepared(config, config.batch(2), tmp_path, "tiny", None, [], None, [])
    prepared.starts = [tmp_path / "first" / "checkpoint-2"]
    prepared.order = {"run.json": b'{"dealt": {"together": 4, "processes": 2}, "seed": 1}', "rows.crc32": b""}
    left = again(prepared, 1)
    assert "2 now and 4 in" in caplog.text
    assert json.loads(left.order["run.json"]) == {"dealt": {"together": 2, "processes": 1}, "seed": 1}
    again(left, 1)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(("fewest", "said"), [(2, "only 1 left"), (1, "no number of processes from 1 to 1 fits")])
def test_why_none_goes_on_is_told(fewest: int, said: str, tmp_path: Path, monkeypatch, capsys) -> None:
    config = SftConfig(nproc=2, save_steps=2, max_restarts=1, min_processes=fewest, shard_group=2)
    prepared = Prepared(config, config.batch(2), tmp_path, "tiny", None, [], None, [])
    monkeypatch.setattr(elastic, "run_group", lambda *_, **__: Ended(FAILURE, lost=1))
    assert elastic.launch_run(lambda *_: 0, prepared, 2) == FAILURE
    assert f"no restart: {said}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [("no_checkpoints", "add --save-steps"), ("no_restarts", "add --max-restarts"), ("too_many", "more than the 2")],
)
def test_what_cannot_be_meant_is_refused(whole, name: str, text: str) -> None:
    assert whole[name].code == 2, whole[name].output
    assert text in whole[name].output
