"""Promise: what is wrong with the machines of a run is said at once, by name, and none of them waits without end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from machines.hosts import Host, Hosts
from machines.launch import Launch, ended, told_within

pytestmark = [pytest.mark.machines, pytest.mark.slow]


def processes(host: Host, sign: str) -> list[int]:
    """Those on a host whose command has `sign`, by their number there."""
    told = subprocess.run(host.inside("ps", "-eo", "pid,args"), capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in told.splitlines()[1:] if sign in line]


def left_behind(hosts: list[Host]) -> list[int]:
    return [pid for host in hosts for pid in processes(host, "shardproof sft")]


def test_a_host_that_comes_late_is_waited_for_and_one_that_never_comes_is_named(
    hosts: Callable[..., Hosts], sft: Launch, tmp_path: Path
) -> None:
    two = hosts(2)
    sft.one(two[0], "2", "late")
    missing = "node0 waits for the other machines at node0:29500: no word from --node-rank 1 of 2 machines"
    assert told_within(two[0], tmp_path, missing, 20) < 20  # 8 s after the launcher has begun
    sft.one(two[1], "2", "late")
    codes, said = ended(two, tmp_path)
    assert codes == [0, 0], said
    sft.one(two[0], "2", "never")
    time.sleep(5)
    os.kill(two[0].runs[-1].pid, signal.SIGINT)  # Ctrl-C is heard, too
    for pid in processes(two[0], "--output-dir never"):
        subprocess.run(two[0].inside("kill", "-INT", str(pid)), check=True)
    codes, said = ended(two[:1], tmp_path, 10)
    assert codes[0] not in (0, -1000), said


@pytest.mark.parametrize("how", ["die", "cut_off"])
def test_a_host_that_is_lost_before_ranks_know_each_other(
    hosts: Callable[..., Hosts], sft: Launch, tmp_path: Path, how: str
) -> None:
    three = hosts(3)
    sft.on(three, "out")
    limit = time.monotonic() + 60
    while not processes(three[1], "-u -m shardproof"):
        assert time.monotonic() < limit
        time.sleep(0.1)
    getattr(three[1], how)()
    rest = [three[0], three[2]]
    for host in rest:
        assert told_within(host, tmp_path, "node1", 25) < 25
    codes, said = ended(rest, tmp_path, 30)
    assert all(code not in (0, -1000) for code in codes), said
    assert left_behind(rest) == []


def test_a_port_that_is_taken(hosts: Callable[..., Hosts], sft: Launch, tmp_path: Path) -> None:
    """By another program, or by another job on the same machines, which is not disturbed."""
    two = hosts(2)
    sft.on(two, "first", "--max-steps", "400")
    sft.wait_for_step(two, "first", 2)
    first = [host.runs[-1] for host in two]
    begin = time.monotonic()
    sft.on(two, "second")
    codes, said = ended(two, tmp_path, 30)
    assert time.monotonic() - begin < 30
    assert codes == [2, 1], said
    assert "MASTER_PORT=29500 cannot be used on node0" in said[0]
    assert "node1 got an answer at node0:29500, but not from a launcher that waits for machines" in said[1]
    assert [run.poll() for run in first] == [None, None]
    steps = len(sft.log("first"))
    time.sleep(3)
    assert len(sft.log("first")) > steps


@pytest.mark.parametrize("kind", ["options", "weights", "packages"])
def test_hosts_that_differ_are_told_apart(
    hosts: Callable[..., Hosts], sft: Launch, tiny: Path, tmp_path: Path, kind: str
) -> None:
    two = hosts(2)
    model, variables = f"{two[0].local}/model", {}
    for host in two:
        subprocess.run(host.inside("cp", "-r", str(tiny), model), check=True)
    if kind == "weights":
        change = f"printf abcd | dd of={model}/model.safetensors bs=1 seek=20000 conv=notrunc"
        subprocess.run(two[1].inside("sh", "-c", change), check=True, capture_output=True)
    if kind == "packages":
        about = tmp_path / "fake" / "transformers-9.9.9.dist-info" / "METADATA"
        about.parent.mkdir(parents=True)
        about.write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 9.9.9\n")
        variables["PYTHONPATH"] = f"{about.parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    for host in two:
        more = ["--learning-rate", "2e-3"] if kind == "options" and host.number else []
        where = ["--nnodes", "2", "--node-rank", str(host.number), "--master-addr", "node0"]
        argv = sft.argv("out", "--model", model, *more, *where)
        host.start(argv, tmp_path, variables if host.number else None)
    codes, said = ended(two, tmp_path, 100)
    assert codes == [2, 2], said
    wanted = {
        "options": "node1 was given --learning-rate 0.002, node0 0.001",
        "weights": "on node1 is not the same as on node0: model.safetensors differs",
        "packages": "node1 has transformers 9.9.9, node0 has",
    }
    for text in said:
        assert wanted[kind] in text
    assert not (tmp_path / "out").exists()


def test_rows_are_read_on_the_first_host(hosts: Callable[..., Hosts], sft: Launch, rows: Path, tmp_path: Path) -> None:
    """So they may lie there alone; where they lie on another one alone, all end."""
    two = hosts(2)
    for place, codes_of in ((0, [0, 0]), (1, [2, 2])):
        file = f"{two[0].local}/rows{place}.jsonl"
        subprocess.run(two[place].inside("cp", str(rows), file), check=True)
        sft.on(two, f"out{place}", "--dataset", file)
        codes, said = ended(two, tmp_path)
        assert codes == codes_of, said
    assert f"There is no file {file}" in said[0]


@pytest.mark.parametrize("more", [[], ["--max-restarts", "1", "--save-steps", "2"]])
def test_addresses_of_version_6(hosts: Callable[..., Hosts], sft: Launch, tmp_path: Path, more: list[str]) -> None:
    two = hosts(2)
    for host in two:
        added = host.inside("ip", "-6", "address", "add", f"fd77::{host.number + 1}/64", "dev", "eth7", "nodad")
        if subprocess.run(added, capture_output=True).returncode:
            pytest.skip("no IPv6 here")
    for host in two:
        where = ["--nnodes", "2", "--node-rank", str(host.number), "--master-addr", "fd77::1"]
        host.start(sft.argv("out", *more, *where), tmp_path)
    codes, said = ended(two, tmp_path)
    assert codes == [0, 0], said


@pytest.mark.parametrize("more", [[], ["--max-restarts", "2"]])
def test_a_launcher_that_is_asked_to_end(
    hosts: Callable[..., Hosts], sft: Launch, tmp_path: Path, more: list[str]
) -> None:
    """Slurm and Kubernetes do that to one machine or to all: the run ends with its weights and a checkpoint."""
    two = hosts(2)
    sft.on(two, "out", "--max-steps", "4000", "--save-steps", "1000", *more)
    sft.wait_for_step(two, "out", 3)
    launcher = [pid for pid in processes(two[1], "-m shardproof sft") if pid not in processes(two[1], " -u ")]
    subprocess.run(two[1].inside("kill", "-TERM", str(launcher[0])), check=True)
    codes, said = ended(two, tmp_path, 60)
    assert codes == [143, 143], said
    step = len(sft.log("out"))
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    assert (tmp_path / "out" / f"checkpoint-{step}" / "checkpoint.json").exists()
    assert left_behind(two) == []


def test_the_middle_one_of_three_dies_while_a_checkpoint_is_written(
    hosts: Callable[..., Hosts], sft: Launch, tmp_path: Path
) -> None:
    """The one before stays, and the other two go on from there."""
    three = hosts(3)
    sft.on(three, "out", "--max-steps", "4000", "--save-steps", "1")
    sft.wait_for_step(three, "out", 3)
    while not list((tmp_path / "out").glob("*.unfinished")):
        time.sleep(0.001)
    three[1].die()
    rest = [three[0], three[2]]
    codes, said = ended(rest, tmp_path, 30)
    assert codes == [1, 1], said
    assert all("on node1 is gone" in text for text in said), said
    assert left_behind(rest) == []
    last = max(
        int(folder.parent.name.split("-")[1]) for folder in (tmp_path / "out").glob("checkpoint-*/checkpoint.json")
    )
    for rank, host in enumerate(rest):
        where = ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", "node0"]
        more = ["--max-steps", str(last + 2), "--save-steps", "1", "--resume", "auto"]
        host.start(sft.argv("out", *more, *where), tmp_path)
    codes, said = ended(rest, tmp_path)
    assert codes == [0, 0], said
    assert [line["step"] for line in sft.log("out") if "loss" in line] == list(range(1, last + 3))


LOOP = """
import json, os, sys, torch, shardproof
folder, rank = sys.argv[1], int(os.environ["RANK"])

def made(stage):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(400, 400) for _ in range(3)))
    shardproof.shard(model, stage)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

def step(model, optimizer, rows):
    model(rows).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
    weights = shardproof.full_state_dict(model, rank0_only=False)
    return {name: value.double().sum().item() for name, value in weights.items()}

rows = torch.randn(4, 400, generator=torch.Generator().manual_seed(rank))
model, optimizer = made(3)
step(model, optimizer, rows)
saving = shardproof.save(model, optimizer, f"{folder}/saved", step=1, own=rank)
expected = step(model, optimizer, rows)
saving.wait()
other, its = made(1)
values = shardproof.load(other, its, f"{folder}/saved")
same = expected == step(other, its, rows)
print("found", json.dumps([same, values["step"], values["own"], sorted(os.listdir(folder))]))
"""


def test_a_checkpoint_on_the_first_host_alone(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    """Two ranks on each of two hosts that share no folder: saved at stage 3, loaded at stage 1."""
    two = hosts(2)
    (tmp_path / "loop.py").write_text(LOOP)
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    for host in two:
        where = ["--node-rank", str(host.number), "--master-addr", "node0"]
        host.start([*run, *where, "loop.py", str(host.local)], tmp_path)
    codes, said = ended(two, tmp_path, 100)
    assert codes == [0, 0], said
    for host, text in zip(two, said, strict=True):
        found = sorted(json.loads(line[6:]) for line in text.splitlines() if line.startswith("found "))
        here = ["saved"] if host.number == 0 else []
        assert found == [[True, 1, 2 * host.number + n, here] for n in range(2)], text
    assert "is not seen by rank(s) 2, 3" in said[0]


def test_a_run_whose_folder_is_on_the_first_host_alone(
    hosts: Callable[..., Hosts], sft: Launch, tmp_path: Path
) -> None:
    """It has the losses and the weights of any other, and goes on, also on fewer hosts."""
    two = hosts(2)
    out = f"{two[0].local}/run"
    saves = ["--save-steps", "2"]
    sft.on(two, out, *saves, "--max-steps", "2")
    codes, said = ended(two, tmp_path)
    assert codes == [0, 0], said
    sft.on(two, out, *saves, "--resume", "auto")
    codes, said = ended(two, tmp_path)
    assert codes == [0, 0], said
    sft.here("one", "--nproc", "2")
    subprocess.run(two[0].inside("cp", "-r", out, str(tmp_path / "copy")), check=True)
    assert sft.losses("copy") == pytest.approx(sft.losses("one"), abs=1e-6)
    sizes = [(tmp_path / run / "model" / "model.safetensors").stat().st_size for run in ("copy", "one")]
    assert sizes[0] == sizes[1]
    sft.here("copy", *saves, "--max-steps", "6", "--resume", "auto")
    sft.here("one6", "--nproc", "2", "--max-steps", "6")
    assert sft.losses("copy") == pytest.approx(sft.losses("one6"), abs=1e-6)
    sft.on(two, f"{out}2", *saves, "--max-restarts", "1")
    codes, said = ended(two, tmp_path)
    assert codes == [2, 2], said
    assert f"node1 does not see the folder {out}2 of node0, and --max-restarts may bring" in said[0]
