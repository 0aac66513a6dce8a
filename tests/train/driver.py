"""Runs several `shardproof` commands, each in a fork of one process that has imported everything.

`python driver.py JOBS.json`: a list of {"argv": [...], "log": FILE}; prints a list of exit codes.
"""

from __future__ import annotations

import json
import os
import sys
import traceback


def run(argv: list[str], log: str) -> int:
    pid = os.fork()
    if pid == 0:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
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
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    from shardproof.cli.quiet import before_imports

    before_imports(local=True, verbose=False)
    import shardproof.data.encode
    import shardproof.models.tiny
    import shardproof.train.chat
    import shardproof.train.trainer  # noqa: F401  (imported once, where each command would take seconds)
    from shardproof.models.classes import import_class

    with open(sys.argv[1], encoding="utf-8") as file:
        jobs = json.load(file)
    for model in {job["argv"][job["argv"].index("--model") + 1] for job in jobs if "--model" in job["argv"]}:
        import_class(model)
    if any(job["argv"][0] == "rlhf" for job in jobs):
        from trl import DPOTrainer, GRPOTrainer  # noqa: F401
    print(json.dumps([run(job["argv"], job["log"]) for job in jobs]))
