"""Promise: when a rank is gone, or ranks wait for each other for good, every rank ends soon, with one message."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist, shardproof
from torch import nn

def meets_its_end(step):
    if step != 6 or rank != 1:
        return
    print("EVENT", time.time(), flush=True)
    if what.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        raise ValueError("a bad batch")
    if what == "barrier":
        dist.barrier()
    if what == "broadcast of a parameter":
        dist.broadcast(next(model.parameters()).data, 0)
    if what == "save":
        shardproof.full_state_dict(model)
    if what == "state_dict":
        entries = model.state_dict()
        print("WHOLE", all(entries[name].shape == p.shape for name, p in model.named_parameters()), flush=True)
    if what == "norm":
        next(model.parameters()).detach().norm()
    if what == "copy":
        import copy
        copy.deepcopy(model)(torch.randn(2, 16))
    if what == "exit":
        sys.exit(0)
    if what == "busy":
        time.sleep(3 * patience)
    if what == "raise, and look at gradients on the way out":  # as a launcher's clean-up does
        try:
            raise ValueError("a bad batch")
        except ValueError:
            model.float().zero_grad()
            model(torch.randn(2, 16)).square().mean().backward()
            print(next(model.parameters()).grad.norm())
            raise

what, patience, stage = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
model = shardproof.shard(nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)]), stage, units=["1"],
                         desync_timeout=patience)
optimizer = torch.optim.AdamW(model.parameters())
if "looks before" in what:  # who looks which connections are closed closes its own
    look = shardproof.zero.comm.collectives.Collectives.lost_ranks
    def slowly(comm):
        time.sleep(1 if rank == 0 else 0)
        found = look(comm)
        time.sleep(2.5 if rank == 2 else 0)
        return found
    shardproof.zero.comm.collectives.Collectives.lost_ranks = slowly
try:
    for step in range(12):
        meets_its_end(step)
        model(torch.randn(2, 16)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if what == "leave, a sum on its way":
        print("EVENT", time.time(), flush=True)
        if rank == 1:
            dist.barrier()
        model(torch.randn(2, 16)).square().mean().backward()  # planned: the sums begin without a word
        print("ON ITS WAY", flush=True)
        sys.exit(3)
    if what == "two collectives":
        print("EVENT", time.time(), flush=True)
        shardproof.zero.ranks.watchdog.STILL = 5
        dist.all_reduce(torch.ones(1)) if rank == 0 else dist.broadcast(torch.ones(3), 0)
    if what == "a mistake of the engine":
        print("EVENT", time.time(), flush=True)
        shardproof.zero.ranks.watchdog.STILL = 3
        streams = model[0].weight.flat.engine.streams
        with streams.waiting(0, 0):
            streams.comm.words.receive((rank + 1) % 3)
    if what.startswith("one rank alone"):
        print("EVENT", time.time(), flush=True)
        if rank == 0:  # which holds the store
            entries = {name: entry.clone() for name, entry in model.state_dict().items()}
            print("WHOLE", all(entries[name].shape == p.shape for name, p in model.named_parameters()), flush=True)
        if "barrier" in what:
            shardproof.barrier(model)
    if what == "state_dict, the others wait":
        print("EVENT", time.time(), flush=True)
        model.state_dict() if rank == 1 else dist.barrier()
    print("TRAINED", flush=True)
finally:
    time.sleep(3 if rank == 0 and "looks before" in what else 0)  # it holds the store
    print("END", time.time(), flush=True)
"""


def run(what: str, folder: Path, patience: float = 10.0, stage: int = 3) -> tuple[list[str], list[str], float]:
    """Three ranks, without a launcher that would end the others. Returns stdout and stderr by rank, and the seconds
    from the event to the end of the last rank."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), what, str(patience), str(stage)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        told = [process.communicate(timeout=90) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    event = float(re.search(r"EVENT ([\d.]+)", told[1][0]).group(1))
    ends = [float(m.group(1)) for out, _ in told if (m := re.search(r"END ([\d.]+)", out))]
    return [out for out, _ in told], [err for _, err in told], max(ends) - event


def messages(errors: list[str]) -> list[str]:
    """What the engine said, on any rank."""
    return [line for text in errors for line in text.splitlines() if line.startswith("shardproof: ")]


def test_an_exception_on_one_rank_is_shown_there_and_named_elsewhere(tmp_path):
    _, errors, seconds = run("raise", tmp_path)
    assert seconds < 10
    assert "Traceback" in errors[1]
    assert "ValueError: a bad batch" in errors[1]
    (message,) = messages(errors)
    assert "Rank 1 stopped with ValueError: a bad batch" in message
    assert "train.py:13" in message
    for other in (errors[0], errors[2]):
        assert "Traceback" not in other
        if message in other:
            assert re.search(r"Rank [02] waited for .* at .*train.py:\d+", other)


@pytest.mark.slow
def test_an_exception_is_shown_where_another_follows_from_what_it_left(tmp_path):
    _, errors, seconds = run("raise, and look at gradients on the way out", tmp_path, patience=3.0)
    assert seconds < 20
    assert "ValueError: a bad batch" in errors[1]
    assert "Traceback" not in errors[0] + errors[2]
    assert messages(errors) == ["shardproof: The ranks are not doing the same thing:"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["kill", pytest.param("kill, one looks before the other", marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_is_named(tmp_path, what):
    _, errors, seconds = run(what, tmp_path)
    assert seconds < 10
    (message,) = messages(errors)
    assert message.startswith("shardproof: Rank 1 is gone")
    assert "Traceback" not in errors[0] + errors[2]


@pytest.mark.slow
def test_who_copies_a_model_alone_is_told(tmp_path):
    """An average that only the first rank keeps: its copy is sharded, too."""
    _, errors, seconds = run("copy", tmp_path)
    assert seconds < 10
    assert "a model was sharded, or a sharded one copied (copy.deepcopy)" in "".join(errors)
    assert "KeyError" not in "".join(errors)


@pytest.mark.slow
def test_a_rank_that_comes_to_its_end_early_is_named(tmp_path):
    _, errors, seconds = run("exit", tmp_path)
    assert seconds < 10
    assert messages(errors) == ["shardproof: Rank 1 has reached the end of its program."]


@pytest.mark.slow
def test_who_goes_on_alone_with_a_model_is_told_how_the_others_wait(tmp_path):
    _, errors, seconds = run("one rank alone", tmp_path)
    assert seconds < 10
    assert "reached the end of its program" in errors[0]
    assert "shardproof.barrier(model)" in errors[0]
    out, errors, _ = run("one rank alone, a barrier at the end", tmp_path)
    assert "WHOLE True" in out[0]
    assert messages(errors) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "doing", "others"),
    [
        # Who saves takes part in the end of the others' step on the way.
        pytest.param("save", "collect the state dict", "compute norms", marks=pytest.mark.slow),
        ("norm", "compute norms", "finish a step"),
    ],
)
def test_a_rank_at_another_meeting_is_told_at_once(tmp_path, what, doing, others):
    _, errors, seconds = run(what, tmp_path)
    assert seconds < 5
    assert len(messages(errors)) == 1
    text = "\n".join(errors)
    assert f"rank 1 wants to {doing}" in text
    assert f"rank 0 wants to {others}" in text
    assert f"rank 2 wants to {others}" in text
    at = dict(re.findall(r"rank (\d) wants to .*, at .*train\.py:(\d+) \(", text))
    lines = SCRIPT.splitlines()
    called = {rank: lines[int(number) - 1].strip() for rank, number in at.items()}
    assert called["1"].startswith({"save": "shardproof.full_state_dict(", "norm": "next(model.parameters())"}[what])
    assert called["0"] == called["2"] == "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_rank_that_sits_in_a_barrier_of_its_own_is_found(tmp_path, stage):
    _, errors, seconds = run("barrier", tmp_path, stage=stage)
    assert seconds < 10
    text = "\n".join(errors)
    assert text.count("The ranks wait for each other for good") <= 2  # rank 1 itself says why its barrier failed
    assert re.search(r"rank 1 is in torch.distributed.barrier, called at .*train.py:15", text)
    assert re.search(r"rank 0 waits for .*(gather|reduce|finish a step).*train.py:\d+", text)
    assert "Traceback" not in text


@pytest.mark.slow
def test_so_it_is_where_it_broadcasts_a_parameter(tmp_path):
    """Its value is gathered, which is no collective of the user's; the broadcast is."""
    _, errors, seconds = run("broadcast of a parameter", tmp_path, patience=3.0)
    assert seconds < 20
    assert "rank 1 is in torch.distributed.broadcast, called at" in "\n".join(errors)


@pytest.mark.slow
def test_a_rank_that_is_merely_slow_is_waited_for(tmp_path):
    out, errors, _ = run("busy", tmp_path, patience=1.0)
    assert [text.count("TRAINED") for text in out] == [1, 1, 1]
    assert messages(errors) == []


@pytest.mark.slow
def test_a_state_dict_on_one_rank_is_whole_while_the_others_train(tmp_path):
    """They lend their slices on the way to the end of their step."""
    out, errors, _ = run("state_dict", tmp_path)
    assert [text.count("TRAINED") for text in out] == [1, 1, 1], errors
    assert "WHOLE True" in out[1]


@pytest.mark.slow
def test_a_state_dict_on_one_rank_raises_where_the_others_wait_outside(tmp_path):
    """In place of a hang; with what each rank waits for."""
    _, errors, seconds = run("state_dict, the others wait", tmp_path, patience=3.0)
    assert seconds < 20
    text = "\n".join(errors)
    assert re.search(r"rank 1 waits for the others to gather .*train.py:\d+", text)
    assert "in torch.distributed.barrier" in text


@pytest.mark.slow
def test_ranks_that_all_wait_in_the_engine_end_at_some_time(tmp_path):
    """No rank sits outside of it: a mistake of the engine's own, which must not go on for ever either."""
    _, errors, seconds = run("a mistake of the engine", tmp_path, patience=1.0)
    assert 3 <= seconds < 15
    assert any("All ranks have waited for each other for" in line for line in messages(errors))
    assert "please report" in "".join(errors)
    assert all("Traceback" not in error for error in errors)


@pytest.mark.slow
def test_a_rank_that_leaves_while_a_sum_is_on_its_way_ends(tmp_path):
    """Its thread waits for a rank that sits in a collective of its own, which waits for it."""
    told, errors, _ = run("leave, a sum on its way", tmp_path, patience=1.0, stage=0)
    assert "ON ITS WAY" in told[0]
    assert "ON ITS WAY" in told[2]
    assert "Traceback" not in errors[0]
    assert "dist.barrier()" in errors[1]  # the backend's own error: it waited outside of the engine
    assert re.search("Connection closed|Connection reset", errors[1])


@pytest.mark.slow
def test_ranks_in_different_collectives_of_their_own_end_at_some_time(tmp_path):
    """Nobody waits in the engine, and torch's limit does not hold for groups that it makes."""
    _, errors, seconds = run("two collectives", tmp_path, patience=1.0)
    assert 3 <= seconds < 25
    said = "".join(errors)
    assert "All ranks have waited for each other for" in said
    assert "torch.distributed.all_reduce" in said
    assert "torch.distributed.broadcast" in said
    assert "Call the same collectives on every rank" in said
