"""Runs a command again and again, and ends it by SIGKILL at random moments. `python killer.py FOLDER ARGV.json TIMES`

The command is forked from this process, which has imported everything. In turn all of its processes are killed, or one
rank; half of the times while a checkpoint is being written. The last run is left alone. Prints, as JSON, how it ended,
what all have said, and the newest step that was complete before and after each kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

from driver import ended_with, start

from shardproof.checkpoint.folder import complete


def newest(folder: Path) -> int:
    return max((int(path.name.partition("-")[2]) for path in complete(folder)), default=0)


def ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill(pid: int, folder: Path, number: int, chance: random.Random) -> tuple[int, int]:
    """Returns the newest step before and after."""
    begin, wanted = newest(folder), chance.randint(0, 3)
    limit = time.monotonic() + 120
    while newest(folder) < begin + wanted and not ended(pid) and time.monotonic() < limit:
        time.sleep(0.002)
    while number % 4 < 2 and not list(folder.glob("checkpoint-*.unfinished")) and not ended(pid):
        if time.monotonic() > limit:
            break
    time.sleep(chance.random() * (0.02 if number % 4 < 2 else 0.5))
    before = newest(folder)
    ranks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if not ended(pid) else []
    with contextlib.suppress(ProcessLookupError):
        if number % 2 and ranks:
            os.kill(int(chance.choice(ranks)), signal.SIGKILL)
        else:
            os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return before, newest(folder)


def main(place: str, file: str, times: str) -> None:
    from shardproof.cli.quiet import before_imports

    before_imports(local=True, verbose=False)
    import shardproof.data.encoding.encode
    import shardproof.models.tiny
    import shardproof.train.trainer  # noqa: F401

    folder, chance = Path(place), random.Random(0)
    argv, log = json.loads(Path(file).read_text()), folder.with_suffix(".log")
    begin = partial(start, argv, log, os.O_APPEND, apart=True)
    steps = [kill(begin(), folder, number, chance) for number in range(int(times))]
    code = ended_with(begin())
    print(json.dumps({"steps": steps, "code": code, "log": log.read_text()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
