"""`shardproof report RUN_DIR ...`: write one page that shows runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from shardproof.cli.options import Parser
from shardproof.errors import ConfigError

DESCRIPTION = """Write one HTML page that shows runs: losses and rewards, learning rate, gradient norm, throughput,
memory and bytes on the wire of each rank, the timeline of one step, answers, configuration; for several runs, their
differences. The page needs no network and no other file."""


def parser() -> Parser:
    """The option table of the command."""
    made = Parser(
        prog="shardproof report",
        usage="shardproof report RUN_DIR [RUN_DIR ...] [--output FILE]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="the output folder of a run")
    made.add_argument("--output", metavar="FILE", help="where the page goes (default: report.html in the first folder)")
    return made


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    found = parser().parse_args(list(argv))
    folders = run_folders(found.run_dirs)
    from shardproof.report.html import data_of, page_of
    from shardproof.report.run_folder import REPORT

    file = Path(found.output).expanduser() if found.output else folders[0] / REPORT
    page = page_of(data_of(folders))
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}. Name another file with --output.") from error
    print(f"report: {file}")
    return 0


def run_folders(names: Sequence[str]) -> list[Path]:
    """The folders, each once.

    Raises:
        ConfigError: one does not exist, or holds no run.
    """
    from shardproof.report.run_folder import is_run

    folders = []
    for name in dict.fromkeys(names):
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"There is no folder {name}.{_runs_beside(folder)}")
        if not is_run(folder):
            raise ConfigError(
                f"{name} holds no run: neither config.yaml nor metrics.jsonl is in it.{_runs_beside(folder / 'x')}"
            )
        folders.append(folder)
    return folders


def _runs_beside(folder: Path) -> str:
    """A hint at runs that may have been meant."""
    from shardproof.report.run_folder import is_run

    around = folder.parent
    try:
        runs = sorted(str(path) for path in around.iterdir() if path.is_dir() and is_run(path))
    except OSError:
        return ""
    return f"\nRuns in {around}: {', '.join(runs[-5:])}" if runs else ""
