"""Promise: NNODES, NODE_RANK and MASTER_ADDR make several machines one run, with the numbers of one machine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardproof.cli import sft
from shardproof.cli.processes.machines import Machines
from shardproof.errors import ConfigError

OPTIONS = ["--max-steps", "3", "--global-batch-size", "4", "--stage", "3", "--learning-rate", "1e-3"]


def start(node: int, port: int, argv: list[str], folder: Path) -> subprocess.Popen[str]:
    """The same command on each machine; here the machines are processes that share an address."""
    machines = {"NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-m", "shardproof", *argv],
        env={**os.environ, **machines, "NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


@pytest.mark.slow
def test_two_machines_give_the_losses_of_one(tiny: Path, rows: Path, tmp_path: Path) -> None:
    argv = ["--model", str(tiny), "--dataset", str(rows), *OPTIONS]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = [start(node, port, ["sft", *argv, "--output-dir", "two"], tmp_path) for node in range(2)]
    try:
        told = [node.communicate(timeout=200) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], told
    assert "stage 3 on 2 process(es)" in told[0][0]
    assert told[1][0] == ""  # the first machine speaks for all
    one = [*argv, "--output-dir", "one", "--nproc", "2"]
    subprocess.run([sys.executable, "-m", "shardproof", "sft", *one], cwd=tmp_path, check=True, timeout=200)

    def losses(name: str) -> list[float]:
        return [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()[:3]]

    assert losses("two") == pytest.approx(losses("one"), abs=1e-6)


def two_ended(command: list[str], folder: Path) -> tuple[list[int], list[tuple[str, str]]]:
    """A command begun in two folders, node0 and node1: exit codes, and what was said."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = [start(node, port, command, folder / f"node{node}") for node in range(2)]
    try:
        told = [node.communicate(timeout=200) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    return [node.returncode for node in nodes], told


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    found = [tmp_path / f"node{node}" for node in range(2)]
    for place in found:
        place.mkdir()
    return found


@pytest.mark.slow
def test_launchers_begun_in_different_folders_write_into_that_of_the_first(
    tiny: Path, rows: Path, tmp_path: Path, places: list[Path]
) -> None:
    argv = ["sft", "--model", str(tiny), "--dataset", str(rows), *OPTIONS, "--save-steps", "2", "--output-dir", "out"]
    codes, told = two_ended(argv, tmp_path)
    assert codes == [0, 0], told
    assert (places[0] / "out" / "model" / "model.safetensors").is_file()
    argv[argv.index("--max-steps") + 1] = "4"
    codes, told = two_ended([*argv, "--resume", "auto"], tmp_path)
    assert codes == [0, 0], told
    log = [json.loads(line) for line in (places[0] / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if "loss" in line] == [1, 2, 3, 4]
    assert not (places[1] / "out").exists()


@pytest.mark.slow
def test_reward_files_that_differ_are_refused(tiny: Path, rows: Path, tmp_path: Path, places: list[Path]) -> None:
    for number, place in enumerate(places):
        (place / "rewards.py").write_text(
            f"def same(completions, **columns):\n    return [{number}] * len(completions)\n"
        )
    argv = ["rlhf", "--rlhf-type", "grpo", "--model", str(tiny), "--dataset", str(rows), "--output-dir", "out"]
    codes, told = two_ended([*argv, "--max-steps", "1", "--reward-funcs", "rewards.py:same"], tmp_path)
    assert codes == [2, 2], told
    host = socket.gethostname()
    assert f"rewards.py on {host} (rank 1) is not the same as on {host} (rank 0)" in told[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["pictures", "rows", "file"])
def test_machines_that_see_other_pictures_or_rows_are_refused(
    tiny_models, files: Path, tmp_path: Path, places: list[Path], lost: str
) -> None:
    text = "".join(
        json.dumps({"query": f"<image>{n}?", "response": "two", "images": ["a.png"]}) + "\n" for n in range(8)
    )
    for place in places:
        (place / "rows.jsonl").write_text(text)
        shutil.copy(files / "a.png", place)
    if lost == "pictures":
        (places[1] / "a.png").unlink()
    elif lost == "rows":
        (places[1] / "rows.jsonl").write_text(text.replace("two", "six"))
    else:
        (places[1] / "rows.jsonl").unlink()
    argv = ["sft", "--model", str(tiny_models("minicpmv4_6")), "--dataset", "rows.jsonl", *OPTIONS]
    codes, told = two_ended([*argv, "--output-dir", "out"], tmp_path)
    assert codes == [2, 2], told
    host = socket.gethostname()
    expected = {
        "pictures": f"{host} (rank 1) cannot use rows.jsonl:1: image 1 (a.png): there is no such file",
        "rows": f"rows.jsonl is not the same on {host} (rank 1) as on {host} (rank 0)",
        "file": f"{host} (rank 1) has no rows.jsonl",
    }
    assert expected[lost] in told[0][1]
    assert not (places[0] / "out").exists()


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"NNODES": "2"}, "NNODES=2 needs MASTER_ADDR"),
        ({"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "2"}, "NODE_RANK=2: with NNODES=2 it must be from 0 to 1"),
        ({"NNODES": "two"}, "NNODES=two is neither a number nor"),
    ],
)
def test_variables_that_do_not_fit_are_refused(monkeypatch, variables, text):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=text):
        sft.run([])


def test_one_machine_needs_none_of_them():
    assert Machines.of({}) is None
    assert Machines.of({"NNODES": "1", "MASTER_ADDR": "here"}) is None
