"""Runs `shardproof` commands, each in a fork of this process, which has imported everything.

For each line that comes in, {"folder": where, "jobs": [{"argv": [...], "log": FILE}, ...]}, it prints one with a list
of exit codes. The line "end" ends it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback


def start(argv: list[str], log: str | os.PathLike[str], mode: int = os.O_TRUNC, apart: bool = False) -> int:
    """Fork a command that writes to `log`, in a process group of its own if `apart`. Returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    if apart:
        os.setpgid(0, 0)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | mode)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 99
    try:
        from shardproof.cli.main import main

        code = main(argv)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended_with(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    from shardproof.cli.quiet import before_imports

    before_imports(local=True, verbose=False)

    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401  (imported once, where each command would take seconds)

    import shardproof.data.encoding.encode
    import shardproof.models.tiny
    import shardproof.train.answers.chat
    import shardproof.train.trainer  # noqa: F401
    from shardproof.models.loading.classes import import_class

    gc.freeze()  # or each command would go through all of this when a run is over
    for line in iter(sys.stdin.readline, "end\n"):
        if not line:
            break
        request = json.loads(line)
        os.chdir(request["folder"])
        jobs = request["jobs"]
        for model in {job["argv"][job["argv"].index("--model") + 1] for job in jobs if "--model" in job["argv"]}:
            import_class(model)
        if any(job["argv"][0] == "rlhf" for job in jobs):
            from trl import DPOTrainer, GRPOTrainer  # noqa: F401
        print(json.dumps([ended_with(start(job["argv"], job["log"])) for job in jobs]), flush=True)
