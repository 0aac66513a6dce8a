"""Promise: a run on several machines has the numbers of one, and a machine that is lost is told by name, soon.

The machines are made of namespaces: with addresses, names and folders of their own (hosts.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from machines.hosts import Hosts, reason
from machines.launch import Launch, ended, told_within

pytestmark = pytest.mark.machines

PLAIN = """
import json, os, sys, torch, shardproof
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(400, 400) for _ in range(3)))
rows = torch.randn(8, 400)
world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
shardproof.shard(model, 3)
optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-4), []
for _ in range(4):
    loss = model(rows[rank::world]).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(); optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps([losses, shardproof.stats(model).total.bytes_between_nodes]))
"""


def test_a_loop_on_two_hosts_has_the_losses_of_one(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    """And the bytes it counts as sent to the other host are those that leave it."""
    two = hosts(2)
    for host in two:
        where = {"RANK": str(host.number), "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
        host.start([sys.executable, "-c", PLAIN], tmp_path, where)
    codes, said = ended(two, tmp_path)
    assert codes == [0, 0], said
    alone: dict[str, list[float]] = {}
    exec(PLAIN, alone)  # on this machine, which has imported everything
    each = [json.loads(text.splitlines()[-1]) for text in said]
    mean = [sum(pair) / 2 for pair in zip(*(losses for losses, _ in each), strict=True)]
    assert mean == pytest.approx(alone["losses"], rel=1e-5)
    weights = 4 * 3 * (400 * 400 + 400)
    for host, (_, counted) in zip(two, each, strict=True):
        first = weights if host.number == 0 else 0  # all start from the values of rank 0
        left = host.sent() - first
        assert 0.95 * left - host.sent_again() <= counted <= 1.05 * left  # headers of packets, words
        assert counted == pytest.approx(weights * 4, rel=0.05)  # in each step gathered, reduced, and half of it


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_hosts_have_the_losses_of_one_machine(
    hosts: Callable[..., Hosts], sft: Launch, tmp_path: Path, stage: int
) -> None:
    """Their own names are 127.0.1.1 to themselves, as Debian and Ubuntu have it."""
    two = hosts(2, loopback_name=True)
    sft.on(two, "two", "--stage", str(stage))
    codes, said = ended(two, tmp_path)
    assert codes == [0, 0], said
    assert "on 2 process(es)" in said[0]
    assert said[1] == ""  # the first speaks for all
    sft.here("one", "--stage", str(stage), "--nproc", "2")
    assert sft.losses("two") == pytest.approx(sft.losses("one"), abs=1e-6)
    assert len(sft.losses("two")) == 4
    weights = [(tmp_path / out / "model" / "model.safetensors").stat().st_size for out in ("one", "two")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_three_hosts_two_ranks_on_each(hosts: Callable[..., Hosts], sft: Launch, tmp_path: Path) -> None:
    three = hosts(3)
    sft.on(three, "three", "--nproc", "2")
    codes, said = ended(three, tmp_path)
    assert codes == [0, 0, 0], said
    assert "stage 3 on 6 process(es)" in said[0]
    sft.here("one")
    assert sft.losses("three") == pytest.approx(sft.losses("one"), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["die", "cut_off"])
def test_a_lost_host_is_told_within_ten_seconds(
    hosts: Callable[..., Hosts], sft: Launch, tmp_path: Path, how: str, victim: int
) -> None:
    """Whether its processes end or its cable is out; the one that is cut off says the same of the other."""
    two = hosts(2)
    sft.on(two, "lost", "--max-steps", "20000")
    sft.wait_for_step(two, "lost", 3)
    getattr(two[victim], how)()
    rest = [host for host in two if how == "cut_off" or host is not two[victim]]
    for host in rest:
        other = two[1 - host.number]
        why = "is gone" if how == "die" else "does not answer any more"
        assert told_within(host, tmp_path, f"Rank {other.number} on {other.name} {why}", 10) < 10
    codes, said = ended(rest, tmp_path, 30)
    assert codes == [1] * len(rest), said
    assert not any("Traceback" in text for text in said), said


@pytest.mark.slow
def test_a_network_that_comes_back_in_time_costs_a_pause_only(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    """As long as SHARDPROOF_SILENCE says, here more than by itself."""
    two = hosts(2)
    steps = PLAIN.replace("range(4)", "range(400)").replace(
        "loss.backward()", "loss.backward(); open('begun', 'w').close()"
    )
    for host in two:
        where = {"RANK": str(host.number), "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
        host.start([sys.executable, "-c", steps], tmp_path, where | {"SHARDPROOF_SILENCE": "60"})
    limit = time.monotonic() + 100
    while not (tmp_path / "begun").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    two[1].cut_off()
    time.sleep(10)
    assert all(host.runs[0].poll() is None for host in two), [host.said(tmp_path) for host in two]
    two[1].plug_in()
    codes, said = ended(two, tmp_path, 100)
    assert codes == [0, 0], said


@pytest.mark.slow
@pytest.mark.parametrize("how", ["die", "cut_off"])
def test_the_rest_goes_on_from_the_newest_checkpoint(
    hosts: Callable[..., Hosts], sft: Launch, tmp_path: Path, how: str
) -> None:
    """--nnodes 1:2: the rows of a step stay the same, and so do the losses."""
    two = hosts(2)
    steps = ["--max-steps", "60", "--save-steps", "2"]
    sft.on(two, "rest", *steps, "--max-restarts", "2", nodes="1:2")
    sft.wait_for_step(two, "rest", 6)
    getattr(two[1], how)()
    codes, said = ended(two if how == "cut_off" else two[:1], tmp_path)
    assert codes == ([0] if how == "die" else [0, 1]), said
    sft.here("alone", "--nproc", "2", "--max-steps", "60")
    assert [line["step"] for line in sft.log("rest") if "loss" in line] == list(range(1, 61))
    assert sft.losses("rest")[:20] == pytest.approx(sft.losses("alone")[:20], rel=1e-5)
    if how == "cut_off":
        assert "node1 cannot meet the other machines at node0:29500" in said[1]


@pytest.mark.slow
def test_a_slow_link_is_seen(hosts: Callable[..., Hosts], sft: Launch, tmp_path: Path) -> None:
    """What is waited for is in the log of the run, and so in its report."""
    two = hosts(2)
    waited, away, said_last = {}, {}, {}
    for name, speed in (("fast", 0.0), ("slow", 100.0)):
        for host in two:
            if speed:
                host.slow_down(speed)
        sft.on(two, name)
        codes, said = ended(two, tmp_path)
        assert codes == [0, 0], said
        waited[name] = [max(line["ranks"]["waited"]) for line in sft.log(name)]
        away[name] = [line["ranks"]["away"] for line in sft.log(name)]
        said_last[name] = next(line for line in said[0].splitlines()[::-1] if line.startswith("step 4/4"))
    assert away["slow"] == away["fast"]
    # 100 Mbit/s are 12.5 MB/s: no step is over sooner, and little of it is hidden behind so small a model.
    least = [max(of_ranks) / 12.5e6 for of_ranks in away["slow"]]
    assert all(w > 0.5 * seconds for w, seconds in zip(waited["slow"], least, strict=True)), (waited, least)
    assert sum(waited["slow"]) > sum(waited["fast"]) + 0.5 * sum(least) - 1, waited
    assert "to other machines" in said_last["slow"]
    page = tmp_path / "page.html"
    report = [sys.executable, "-m", "shardproof", "report", str(tmp_path / "slow"), str(tmp_path / "fast")]
    subprocess.run([*report, "--output", str(page)], check=True, timeout=100)
    assert '"away"' in page.read_text()


@pytest.mark.slow
def test_folders_that_are_shared(hosts: Callable[..., Hosts], sft: Launch, tmp_path: Path) -> None:
    """test_mistakes.py has those that are not."""
    two = hosts(2)
    sft.on(two, "shared", "--save-steps", "2", "--max-steps", "2")
    codes, said = ended(two, tmp_path)
    assert codes == [0, 0], said
    sft.on(two, "shared", "--save-steps", "2", "--resume", "auto")
    codes, said = ended(two, tmp_path)
    assert codes == [0, 0], said
    sft.here("one", "--nproc", "2")
    assert sft.losses("shared") == pytest.approx(sft.losses("one"), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("lacking", [0, 1])
def test_a_model_on_one_host_only_is_refused(
    hosts: Callable[..., Hosts], sft: Launch, tiny: Path, tmp_path: Path, lacking: int
) -> None:
    two = hosts(2)
    has = two[1 - lacking]
    subprocess.run(has.inside("cp", "-r", str(tiny), f"{has.local}/model"), check=True)
    model = f"{two[0].local}/model"
    sft.on(two, "out", "--model", model)
    codes, said = ended(two, tmp_path, 60)
    assert codes == [2, 2], said
    assert f"There is no model folder {model}" in said[lacking]
    assert f"node{lacking}: There is no model folder {model}" in said[1 - lacking]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_master_nobody_knows_is_refused(hosts: Callable[..., Hosts], sft: Launch, tmp_path: Path) -> None:
    (host,) = hosts(1)
    host.start([*sft.argv("out"), "--nnodes", "2", "--node-rank", "1", "--master-addr", "nowhere"], tmp_path)
    codes, said = ended([host], tmp_path, 30)
    assert codes == [2]
    assert "MASTER_ADDR=nowhere: node0 cannot resolve this name" in said[0]


@pytest.mark.slow
def test_copies_in_each_host_send_a_third_over_a_slow_link(tmp_path: Path) -> None:
    """Of what one copy over all sends: twice the gradients' part instead of weights twice and gradients once."""
    if missing := reason():
        pytest.skip(f"no hosts of namespaces here: {missing}")
    benchmark = Path(__file__).parents[2] / "benchmarks" / "machines.py"
    file = tmp_path / "found.json"
    command = [sys.executable, str(benchmark), "--megabits", "400", "--steps", "4", "--json", str(file)]
    subprocess.run(command, check=True, timeout=550)
    plain, copies = json.loads(file.read_text())
    assert (plain["group"], copies["group"]) == (4, 2)
    for line in (plain, copies):
        assert line["counted"] == pytest.approx(line["sent"], rel=0.1)
    assert copies["counted"] < 0.4 * plain["counted"]
    assert copies["seconds"] < 0.7 * plain["seconds"]
    assert copies["loss"] == pytest.approx(plain["loss"], rel=1e-4)
