"""Promise: ranks that go on are never told that they wait for each other for good, however busy their machine is."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn

import shardproof
from distributed.harness import listening
from shardproof.zero.ranks import frames
from shardproof.zero.ranks.watchdog import Watchdog

PATIENCE = 1e6  # in which the thread of the watchdog does nothing by itself


def watchdog_of_a_model() -> Watchdog:
    model = shardproof.shard(nn.Linear(4, 4), 3, desync_timeout=PATIENCE)
    found = model.weight.flat.engine.streams.watchdog
    assert found is not None
    return found


def verdicts(watchdog: Watchdog, told: list[list[tuple[int, str, float]]]) -> list[int]:
    """After which of these there is a verdict. Each is what ranks say next: the rank, what it does, and since when."""
    found: list[int] = []
    with (
        mock.patch.object(watchdog, "agree_on_verdict", side_effect=lambda reason: found.append(number)),
        mock.patch.object(watchdog, "_end_if_blocked"),  # it ends the program
        mock.patch.object(watchdog, "_seen", {}),
        mock.patch.object(watchdog, "_blocked", {}, create=True),
    ):
        for number, lines in enumerate(told):
            for rank, kind, since in lines:
                watchdog.store.set(f"at/{rank}", json.dumps([kind, 0.45 * PATIENCE, "", since, number]))
            watchdog._evaluate(time.monotonic())
        for rank in range(2):
            watchdog.store.set(f"at/{rank}", "")
    return found


BLOCKED = [(0, "collective", 5.0), (1, "waiting", 7.0)]


def judged() -> None:
    watchdog = watchdog_of_a_model()
    if dist.get_rank() == 0:
        here, there = [BLOCKED[0]], [BLOCKED[1]]
        assert verdicts(watchdog, [BLOCKED, here, here, here]) == []  # rank 1 may have gone on long ago
        assert verdicts(watchdog, [BLOCKED, here, BLOCKED, here]) == []  # what it said again was on its way already
        assert verdicts(watchdog, [BLOCKED, BLOCKED, [(0, "collective", 6.0), *there], BLOCKED]) == []  # rank 0 has
        assert verdicts(watchdog, [BLOCKED, BLOCKED, [(1, "busy", 8.0)], BLOCKED]) == []
        assert verdicts(watchdog, [BLOCKED, BLOCKED, BLOCKED]) == [2]
    dist.barrier()


def test_what_a_rank_has_said_before_it_went_on_is_no_verdict(run2) -> None:
    run2(judged)


def warned() -> None:
    watchdog = watchdog_of_a_model()
    if dist.get_rank() == 0:
        with mock.patch.object(watchdog, "tick"), mock.patch.object(watchdog, "patience", 10.0), listening() as lines:
            for age in (3.0, 59.0, 61.0):
                for rank, kind, seconds in ((0, "busy", 0.0), (1, "waiting", age)):
                    watchdog.store.set(f"at/{rank}", json.dumps([kind, seconds, kind, -age, 0.0]))
                watchdog._evaluate(1e9)
                assert len(lines) == (age > 60)
            assert lines == ["ranks wait for others for more than 61 s:\n  rank 0 busy\n  rank 1 waiting"]
            for rank in range(2):
                watchdog.store.set(f"at/{rank}", "")
    dist.barrier()


def test_only_one_long_wait_is_told_and_not_many_short_ones(run2) -> None:
    run2(warned)


def states_in_calls(between: Any, watchdog: Watchdog) -> list[float]:
    """Since when the main thread is in a collective, as another thread sees it in two calls."""
    made: dict[str, Any] = {}
    exec(compile("def all_reduce(lock): lock.acquire()", frames._COLLECTIVES[0], "exec"), made)
    found: list[float] = []
    for moment in (1.0, 2.0):
        lock = threading.Lock()
        lock.acquire()

        def look(lock: Any = lock, moment: float = moment) -> None:
            while sys._current_frames()[watchdog._main].f_code.co_name != "all_reduce":
                time.sleep(0.001)
            found.append(watchdog._state(moment)[1])
            lock.release()

        thread = threading.Thread(target=look)
        thread.start()
        made["all_reduce"](lock)
        thread.join()
        between(watchdog)
    return found


def wait_in_the_engine(watchdog: Watchdog) -> None:
    watchdog.waits += 1


def calls() -> None:
    watchdog = watchdog_of_a_model()
    with mock.patch.object(watchdog, "tick"):
        for _ in range(20):
            assert states_in_calls(wait_in_the_engine, watchdog) == [1.0, 2.0]
    dist.barrier()


def test_the_next_call_of_a_collective_is_another_one(run2) -> None:
    run2(calls)


def test_only_what_waits_for_others_is_a_collective() -> None:
    """Files are written by what lies beside it, and a rank that writes is never blamed."""
    for folder, waits in (
        ("distributed_c10d.py", True),
        ("nn/functional.py", True),
        ("checkpoint/filesystem.py", False),
    ):
        made: dict[str, Any] = {"frames": []}
        source = "import sys\ndef save(): frames.append(sys._getframe())"
        exec(compile(source, f"{frames._TORCH}distributed/{folder}", "exec"), made)
        made["save"]()
        assert bool(frames.collective_of_the_user(made["frames"][0])[0]) == waits, folder


def frame_in(*files: str) -> Any:
    """The innermost frame where a function of each file calls one of the next; each is called as its file is."""
    call: Any = sys._getframe
    for file in reversed(files):
        made: dict[str, Any] = {"call": call}
        name = os.path.basename(file).partition(".")[0].strip("<>")
        exec(compile(f"def {name}(): return call()", file, "exec"), made)
        call = made[name]
    return call()


MINE, ENGINE, ONE_OF_TORCH = "/home/me/train.py", f"{frames._ENGINE}schedule.py", f"{frames._TORCH}nn/module.py"
COLLECTIVE = frames._COLLECTIVES[0]


def test_a_place_is_the_innermost_line_that_is_the_users() -> None:
    """Packages are, though they may lie in a folder of the standard library."""
    package = f"{frames._STDLIB}site-packages/peft/layer.py"
    integration = f"{frames._INTEGRATIONS}accelerate.py"
    assert os.path.exists(integration)
    for inner in (ENGINE, integration, ONE_OF_TORCH, f"{frames._STDLIB}contextlib.py", "<string>"):
        assert frames.place_in_user_code(frame_in(MINE, inner)) == f"{MINE}:1 (train)", inner
    assert frames.place_in_user_code(frame_in(MINE, package, ONE_OF_TORCH)) == f"{package}:1 (layer)"
    assert frames.place_in_user_code(None) == "the end of its program"


def test_a_collective_is_the_users_where_no_engine_has_called_it() -> None:
    for files, called in (
        ((MINE, COLLECTIVE), True),
        ((MINE, COLLECTIVE, ENGINE, COLLECTIVE), True),  # dist.broadcast(p.data, 0)
        ((MINE, ENGINE, COLLECTIVE), False),
        ((MINE, ONE_OF_TORCH, ENGINE, COLLECTIVE), False),
        ((MINE, COLLECTIVE, ENGINE), False),  # the engine itself waits
        ((MINE, ONE_OF_TORCH), False),
    ):
        frame = frame_in(*files)
        outermost = frame
        for _ in files[2:]:
            outermost = outermost.f_back
        expected = ("distributed_c10d", id(outermost)) if called else ("", 0)
        assert frames.collective_of_the_user(frame) == expected, files
