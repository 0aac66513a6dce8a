"""--profile writes a trace of each rank in which gathers and reductions can be found by name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from shardproof.train.watching.profile import Profiler, in_flight


def event(name: str, ts: float, dur: float) -> dict:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1}


def test_a_span_lasts_from_when_a_gather_is_wanted_until_it_is_taken():
    found = in_flight(
        [
            event("wait: gather layers.1 #2", 5, 2),  # wanted before the trace began
            event("start: gather layers.0 #1", 10, 1),
            event("start: gather layers.0 #1", 20, 1),
            event("start: reduce layers.0 #1", 22, 1),
            event("wait: gather layers.0 #1", 25, 5),
            event("wait: gather layers.0 #1", 40, 1),
            {"ph": "M", "name": "process_name", "pid": 1},
        ],
        rank=3,
    )
    assert [(e["name"], e["ph"], e["ts"]) for e in found] == [
        ("gather layers.0 #1", "b", 10),
        ("gather layers.0 #1", "e", 30),
        ("gather layers.0 #1", "b", 20),
        ("gather layers.0 #1", "e", 41),
    ]
    assert [e["id"] for e in found] == [0, 0, 2, 2]


@pytest.mark.slow
def test_each_rank_writes_a_trace_of_its_steps(commands, sft):
    more = ["--nproc", "2", "--stage", "3"]
    plan = {"profiled": ["--profile", "2"], "short": ["--profile", "9", "--max-steps", "2"], "plain": []}
    done = commands([(name, sft(*more, *own)) for name, own in plan.items()])
    assert all(run.code == 0 for run in done.values()), [run.output for run in done.values()]
    assert done["profiled"].series("loss") == done["plain"].series("loss")
    assert not list(done["plain"].folder.glob("trace.*"))
    for name, steps in {"profiled": 2, "short": 1}.items():
        for rank in range(2):
            with gzip.open(done[name].folder / f"trace.rank{rank}.json.gz", "rt") as file:
                events = json.load(file)["traceEvents"]
            names = [e.get("name", "") for e in events]
            assert (
                sum(n.startswith("ProfilerStep#") and e["ph"] == "X" for n, e in zip(names, events, strict=True))
                >= steps
            )
            assert "aten::mm" in names
            for kind in ("gather", "reduce"):
                assert any(n.startswith(f"start: {kind} model.layers.1 ") for n in names)
                assert any(n.startswith(f"wait: {kind} model.layers.1 ") for n in names)
                spans = [e for e in events if e.get("cat") == "in flight" and e["name"].startswith(kind)]
                begun = {e["id"]: e["ts"] for e in spans if e["ph"] == "b"}
                assert spans
                assert all(e["ts"] >= begun[e["id"]] for e in spans if e["ph"] == "e")


def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As little as a timeline: who has no room for it wants the weights."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(2).sum()
    Profiler(tmp_path / "gone", 1)._write(profiler, 0)
    assert "trace.rank0.json.gz cannot be written: No such file or directory" in caplog.text
