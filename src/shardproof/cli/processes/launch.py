"""Several processes on one machine, through torch's elastic launcher.

On Linux without an accelerator the processes are forked from a parent that has already imported the libraries and
encoded the rows: two workers are ready after 0.2 s, where spawned ones take 7.8 s to import transformers again (and a
third core to do it on). With an accelerator they are spawned, since CUDA does not survive a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from shardproof.cli.main import FAILURE, USER_ERROR, exit_code, message_of
from shardproof.data.encoding.beside import cores
from shardproof.interrupts import asking_to_end, without_terminal

ECHO = 1.0  # seconds within which a second signal counts as the first one, passed on by another process
LOGGERS = "wandb", "swanlab", "trackio"  # flush when told to finish, or at exit
AT_THE_END = 5.0  # seconds they get for it
ENDED_BY_OTHERS = 3.0  # seconds that a rank that lost its peers gives them to report why
# Restarted ranks must not find the addresses of their predecessors in the agent's store.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
FINAL = "final"  # a file with an exit code: ranks that are restarted after it was written end with that code
OF_LAUNCHER = "SHARDPROOF_FINAL"  # its path, for ranks started by a launcher of several machines


def outer_world() -> int | None:
    """The number of processes an outer torchrun has started, or None."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() else None


def say_final(code: int) -> None:
    """Called by a rank that ends: record an end that a restart would only repeat, so that none is tried."""
    place = os.environ.get(OF_LAUNCHER)
    if place and (code == USER_ERROR or code > 128):
        Path(place).write_text(str(code))


def outer_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def forks() -> bool:
    """Whether workers are forked; imports before the launch then serve all of them."""
    import torch

    return sys.platform == "linux" and not torch.accelerator.is_available()


def restarts() -> int:
    """How often the ranks of this run have been restarted."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def stop_signals(nproc: int, max_restarts: int = 0) -> tuple[signal.Signals, ...]:
    """The signals that ask the `work` of `launch` to end: a rank gets them from the process that started it, if any."""
    return (signal.SIGUSR1,) if nproc > 1 or max_restarts else asking_to_end()


class Ended(NamedTuple):
    """How a group of ranks ended: the exit code, and how many of them died on their own."""

    code: int
    lost: int = 0


def run_group(
    work: Callable[..., int | None],
    args: tuple[Any, ...],
    nproc: int,
    debug: bool = False,
    max_restarts: int = 0,
    apart: bool = False,
) -> Ended:
    """Run `work(*args)` on `nproc` ranks.

    `work` returns the number of the signal that ended it early, if any: the exit code is then 128 plus that number.
    When a rank fails, torch's elastic agent restarts all of them, up to `max_restarts` times, but not after a user's
    mistake or Ctrl-C. Finally the first error is shown, once. A single rank that is never restarted runs in this
    process, unless `apart`.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // nproc))
    if nproc == 1 and not (max_restarts or apart):
        use_threads(int(threads))
        stopped = work(*args)
        return Ended(128 + stopped if stopped else 0)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ["OMP_NUM_THREADS"] = threads
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
    os.environ |= OWN_STORE
    quiet_launcher()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id="shardproof",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        start_method="fork" if forks() else "spawn",
        signals_to_handle="SIGQUIT",  # the others are ours
    )
    with tempfile.TemporaryDirectory(prefix="shardproof-") as records, _Interrupt(Path(records)) as interrupt:
        try:
            stopped = max(elastic_launch(config, _rank)(work, args, records, int(threads)).values())
        except ChildFailedError as failed:
            return Ended(128 + interrupt.received) if interrupt.received else _report(Path(records), failed, debug)
        except SignalException as ended:
            return Ended(128 + int(ended.sigval))
    return Ended(128 + (interrupt.received or stopped) if stopped else 0)


def launch(
    work: Callable[..., int | None], args: tuple[Any, ...], nproc: int, debug: bool = False, apart: bool = False
) -> int:
    """Like `run_group`, but returns the exit code only."""
    return run_group(work, args, nproc, debug, apart=apart).code


class _Interrupt:
    """Inside, the first signal to end asks the ranks to finish in their own way; a later one kills them.

    Ranks that do not listen yet end at once, which is the default action of SIGUSR1.
    """

    def __init__(self, records: Path) -> None:
        self.records = records
        self.received, self._since, self._pid = 0, 0.0, os.getpid()

    def __enter__(self) -> _Interrupt:
        self._before = {number: signal.signal(number, self._receive) for number in asking_to_end()}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:  # a rank that was just forked
            os._exit(128 + number)
        now = time.monotonic()
        if self.received and now - self._since < ECHO:
            return
        without_terminal()
        ranks = [process.pid for process in multiprocessing.active_children() if process.pid]
        if not ranks:
            raise KeyboardInterrupt
        (self.records / FINAL).write_text(str(128 + number))
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL if self.received else signal.SIGUSR1)
        if not self.received:
            self.received, self._since = number, now


def quiet_launcher() -> None:
    """Silence the launcher, since we report once what ended a run. Each of torch's modules sets a level on its own
    logger."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def use_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)


def _rank(work: Callable[..., int | None], args: tuple[Any, ...], records: str, threads: int) -> int:
    """One rank: an exception is recorded while its peers still wait for it, so the first one is the cause.

    A forked process would skip the exit handlers of libraries (wandb and the like flush there), so they are run here.
    """
    if forks():
        atexit._clear()  # exit handlers inherited from the parent
    _leave_signals_to(os.getppid(), Path(records))
    use_threads(threads)
    rank, final = int(os.environ["RANK"]), Path(records) / FINAL
    if final.is_file():
        os._exit(int(final.read_text()))
    if restarts() and rank == 0:
        why = _first_cause(Path(records), restarts() - 1) or "a rank was lost"
        print(f"{why}\nrestart {restarts()} of {os.environ['TORCHELASTIC_MAX_RESTARTS']}", file=sys.stderr, flush=True)
    try:
        stopped = work(*args) or 0
        atexit._run_exitfuncs()
        return stopped
    except BaseException as error:
        code = exit_code(error)
        record = {
            "time": time.time(),
            "rank": rank,
            "message": message_of(error),
            "code": code,
            "traceback": traceback.format_exc(),
        }
        partial = Path(records) / f"{restarts()}-{rank}.part"
        partial.write_text(json.dumps(record), encoding="utf-8")
        partial.rename(partial.with_suffix(".json"))
        if code == USER_ERROR:  # a restart would fail in the same way
            final.write_text(str(code))
        if peers_left(error):
            time.sleep(ENDED_BY_OTHERS)
        sys.stdout.flush()
        atexit._run_exitfuncs()
        os._exit(code)


def _leave_signals_to(parent: int, records: Path) -> None:
    """Ctrl-C and a closed terminal signal every process of the terminal: the process that started the ranks passes them
    on, so ranks ignore their own. Ranks end if that process is gone. A rank ends the processes that it has forked to
    read rows.

    [Note: SIGTERM] Slurm and systemd send it to all processes, too. But the agent also uses it to end ranks when one
    has failed, and while they wait for that one no Python handler would run: so a thread receives it, and decides. If
    the run was asked to end, FINAL exists, as its parent was asked as well.
    """
    rank = os.getpid()

    def receive(number: int, frame: Any) -> None:
        if os.getpid() == rank and os.getppid() != parent:
            os._exit(128 + number)
        without_terminal()

    def terminate(number: int, frame: Any) -> None:
        if os.getpid() != rank:
            os._exit(128 + number)

    for number in asking_to_end():
        signal.signal(number, receive)
    signal.signal(signal.SIGTERM, terminate)
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    Thread(target=_mind_terminations, args=(heard, records), daemon=True).start()


def _mind_terminations(heard: int, records: Path) -> None:
    """End this rank by SIGTERM, unless the run was asked to end after its step."""
    while True:
        if signal.SIGTERM not in os.read(heard, 64):
            continue
        limit, failed, asked = time.monotonic() + ECHO, False, False
        while not (failed or asked) and time.monotonic() < limit:
            time.sleep(0.02)
            failed, asked = bool(_records(records, restarts())), _asked_to_end(records)
        if failed or not asked:
            _finish_loggers()
            ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)  # signal.signal works in the main thread only
            os.kill(os.getpid(), signal.SIGTERM)


def _finish_loggers() -> None:
    """Have loggers flush: a signal ends this rank, so their exit handlers will not run."""

    def finish() -> None:
        for name in LOGGERS:
            with contextlib.suppress(Exception):  # not imported, or without a run
                sys.modules[name].finish()

    last = Thread(target=finish, daemon=True)
    last.start()
    last.join(AT_THE_END)


def _asked_to_end(records: Path) -> bool:
    final = records / FINAL
    return final.is_file() and int(final.read_text() or 0) > 128


def peers_left(error: BaseException) -> bool:
    """Whether this rank failed only because another one did."""
    text = str(error).lower()
    signs = ("connection closed", "connection reset", "remote process", "nccl")
    lost = r"rank [\d, ]+( on \S+)? (is gone|does not answer)"
    return any(sign in text for sign in signs) or re.search(lost, text) is not None


def _records(records: Path, attempt: int) -> list[dict[str, Any]]:
    """The errors that the ranks of one attempt have recorded, the earliest first."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in records.glob(f"{attempt}-*.json")]
    return sorted(found, key=lambda record: record["time"])


def _first_cause(records: Path, attempt: int) -> str:
    causes = [record for record in _records(records, attempt) if not peers_left(Exception(record["message"]))]
    return _message(causes[0]) if causes else ""


def _message(record: dict[str, Any]) -> str:
    if record["code"] != FAILURE:
        return str(record["message"])
    return str(record["message"]).replace("error: ", f"error on rank {record['rank']}: ", 1)


def _report(records: Path, failed: Any, debug: bool) -> Ended:
    attempts = [int(file.name.partition("-")[0]) for file in records.glob("*.json")]
    found = _records(records, max(attempts, default=0))
    killed = {rank: failure for rank, failure in failed.failures.items() if failure.exitcode < 0}
    causes = [record for record in found if not any(record["rank"] == rank for rank in killed)]
    own = [record for record in causes if not peers_left(Exception(record["message"]))]
    if killed and not own:
        rank, failure = next(iter(killed.items()))
        name = signal.Signals(-failure.exitcode).name
        hint = "\nThe system kills processes like this when memory runs out." if name == "SIGKILL" else ""
        print(f"error: rank {rank} was ended by {name}.{hint}", file=sys.stderr)
        return Ended(FAILURE, len(killed))
    if not causes:
        print(f"error: a rank ended without an error message ({failed})", file=sys.stderr)
        return Ended(FAILURE, 1)
    first = causes[0]
    if debug:
        print(first["traceback"], file=sys.stderr, end="")
    print(_message(first), file=sys.stderr)
    return Ended(int(first["code"]), max(len(own), 1))
