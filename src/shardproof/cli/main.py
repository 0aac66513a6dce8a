"""The entry point: finds the command, and turns errors into one message and an exit code."""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from collections.abc import Sequence

from shardproof import __version__
from shardproof.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DeviceError,
    EngineError,
    NonFiniteError,
    ShardproofError,
)
from shardproof.interrupts import interrupted, remembered

COMMANDS = {
    "sft": "fine-tune a model on conversations, questions and answers, or raw text; with files, too",
    "rlhf": "train on preferences, or on rewards for generated answers",
    "plan": "show what fits and what is fastest at each stage, before anything is trained",
    "doctor": "report what would go wrong with a run, before anything is trained",
    "verify": "check that a run matches a single process, or show where it first differs",
    "report": "write one page that shows runs: losses, memory, traffic, a step in detail, samples",
    "watch": "show a run in the browser while it trains",
    "infer": "talk to the model of a run",
    "explain": "explain an error message, including those of DeepSpeed, DDP, FSDP and NCCL",
    "export": "write the model of a run to a folder that from_pretrained loads, adapters merged",
    "models": "list the model families with a record",
    "data": "show rows as the model will see them ('data show'), or encode them once ('data encode')",
    "convert": "convert a DeepSpeed, FSDP2 or Accelerate checkpoint into one to resume from",
    "submit": "write the Slurm script or the Kubernetes job that runs a command on several nodes",
    "swift": "translate an ms-swift command into one of ours",
    "cases": "run failure cases from public threads on our engine and its peers",
    "demo": "train a small model on this machine from scratch, in under two minutes",
    "completion": "print the script that lets bash, zsh or fish complete commands and options",
    "env": "show versions, devices and what is installed",
}

# What torch puts before an error of a DataLoader worker.
_WORKER = re.compile(r"\ACaught \w+ in DataLoader worker.*^shardproof\.errors\.\w+: ", re.DOTALL | re.MULTILINE)

USAGE = f"""usage: shardproof COMMAND [options]

Fine-tune language and omni models; the sharding stage is a switch, not a rewrite.

commands:
{chr(10).join(f"  {name:12}{text}" for name, text in COMMANDS.items())}

options:
  --help      show this text; 'shardproof COMMAND --help' shows a command's options
  --version   show the version
"""

USER_ERROR, FAILURE, INTERRUPTED = 2, 1, 130
BROKEN_PIPE = 141  # the exit code a shell reports for a program ended by SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0, 2 for mistakes that the user can fix, 1 for other failures."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if args[0] in ("-V", "--version"):
        print(f"shardproof {__version__}")
        return 0
    try:
        with remembered():
            code = _run(args[0], args[1:])
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the interpreter complains at exit
        return BROKEN_PIPE
    except Exception as error:
        if interrupted() and exit_code(error) != USER_ERROR:  # such as a half-imported module
            print("\ninterrupted", file=sys.stderr)
            return INTERRUPTED
        if _told_by_another(error):
            return exit_code(error)
        if wants_traceback(args):
            traceback.print_exc()
        print(message_of(error), file=sys.stderr)
        return exit_code(error)


def _run(command: str, args: list[str]) -> int:
    if command not in COMMANDS:
        import difflib

        from shardproof.cli.elsewhere import COMMANDS as OF_OTHERS

        if instead := OF_OTHERS.get(command.replace("_", "-")):
            raise ConfigError(f"There is no command {command!r} here: {instead}.")
        option = command.startswith("-")
        known, near = (("--help", "--version"), 0.7) if option else (COMMANDS, 0.6)  # all options share hyphens
        found = difflib.get_close_matches(command, known, n=1, cutoff=near)
        hint = f" Did you mean {found[0]!r}?" if found else " Options go after a command." if option else ""
        raise ConfigError(f"There is no command {command!r}.{hint}\nThe commands are: {', '.join(COMMANDS)}.")
    try:
        return int(importlib.import_module(f"shardproof.cli.{command}").run(args) or 0)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"'shardproof {command}' needs the package {error.name!r}, which is not installed.\n"
            "Install what training needs: pip install 'shardproof[train]'"
        ) from error


def _told_by_another(error: Exception) -> bool:
    """Under torchrun every rank finds the same mistake in options and files; the first rank of a machine reports it.
    The same goes for errors in steps that all ranks take, but not for a rank without a device."""
    if isinstance(error, DeviceError):
        return False
    distributed = sys.modules.get("torch.distributed")
    training = distributed is not None and distributed.is_initialized() and not isinstance(error, NonFiniteError)
    return exit_code(error) == USER_ERROR and not training and os.environ.get("LOCAL_RANK", "0") != "0"


def wants_traceback(args: Sequence[str]) -> bool:
    return any(arg in ("--debug", "--debug=true", "--debug=yes") for arg in args)


def message_of(error: BaseException) -> str:
    """The message for the user: the text of our own errors, and one line for unforeseen ones."""
    if isinstance(error, ShardproofError):
        return f"error: {_WORKER.sub('', str(error))}"
    text = str(error).strip() or "no message"
    return f"error: {type(error).__name__}: {text}\n--debug shows where."


def exit_code(error: BaseException) -> int:
    of_users = CheckpointError, ConfigError, DataError, EngineError, NonFiniteError
    return USER_ERROR if isinstance(error, of_users) else FAILURE
