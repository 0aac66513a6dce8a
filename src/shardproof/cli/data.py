"""`shardproof data show`: rows as the model will see them; `data encode` stores the encoded rows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardproof.cli import data_encode, options, training
from shardproof.cli.quiet import after_imports, before_imports
from shardproof.errors import ConfigError
from shardproof.train.checks.contradictions import check_whole
from shardproof.train.checks.named import check_plugins
from shardproof.train.options.config import SftConfig
from shardproof.train.run import recipe_of

if TYPE_CHECKING:
    from shardproof.train.show import Shown

DESCRIPTION = """Print rows as 'shardproof sft' would train on them: in the model's chat template, text that is not
trained on in grey, with weights that are not 1. Takes the options of 'shardproof sft' unchanged, also from a file;
those about training have no effect."""
GROUPS = ("Model", "Task", "Data", "Media", "Plugins")  # the option groups that --help lists
ROWS = 3
LEARNT = "[[", "]]"  # around the text that is trained on, when there are no colours


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    if argv and argv[0] == "encode":
        return data_encode.run(argv[1:])
    if argv and argv[0] not in ("show", "-h", "--help"):
        there = "'shardproof data show' and 'shardproof data encode'"
        raise ConfigError(f"There is no command 'data {argv[0]}'.\nThere are {there}.")
    config, count, as_json = parse(argv[1:] if argv and argv[0] == "show" else argv)
    from shardproof.cli.hub import run_is_here

    check_whole(config, "data show")
    recipe_of(config).check(config, config.nproc)
    before_imports(run_is_here(config), config.verbose)
    check_plugins(config)
    from shardproof.train.show import show

    after_imports(config.verbose)
    rows, report, skipped = show(config, count)
    if as_json:
        for row in rows:
            print(json.dumps(dataclasses.asdict(row) | {"tokens": len(row.input_ids), "learnt": row.learnt}))
        print(json.dumps({"report": dataclasses.asdict(report), "skipped": skipped}))
    else:
        print_rows(rows, report)
        if skipped:
            print("\n".join([f"--- bad rows, left out: {len(skipped):,}", *skipped]))
    return 0


def parser() -> options.Parser:
    """The option table of the command."""
    usage = "shardproof data show [run.yaml] --model M --dataset D [-n ROWS] [--json] [options]"
    made = options.parser_for(SftConfig, "shardproof data show", usage, DESCRIPTION, GROUPS)
    options.add_run_file(made)
    made.add_argument("-n", "--rows", metavar="N", help=f"how many rows to print (default: {ROWS}); all are counted")
    made.add_argument(
        "--json", action="store_true", help="one object per line, with token ids; the last has the counts"
    )
    return made


def parse(argv: Sequence[str]) -> tuple[SftConfig, int, bool]:
    """The options of `sft`, the number of rows, and whether to print JSON."""
    found = options.parse(parser(), argv, options.of_others(SftConfig))
    count, as_json = found.pop("rows", str(ROWS)), found.pop("json", False)
    if not count.isdecimal():
        raise ConfigError(f"--rows {count} must be a whole number.")
    config, _ = training.read(SftConfig, found, argv, "shardproof data show")
    return config.model_copy(update={"output_dir": None, "resume": None}), int(count), as_json  # nothing is written


def print_rows(rows: Sequence[Shown], report: Any) -> None:
    """On a terminal, text that is not trained on is grey; elsewhere, text that is trained on is in brackets."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    begin, end = ("", "") if console.color_system else LEARNT
    for row in rows:
        learnt = f"{row.learnt} of them learned" if row.label is None else f"label {row.label}"
        state = row.left_out or f"{len(row.input_ids)} tokens, {learnt}{', cut' if row.cut else ''}"
        console.print(Text(f"--- {row.where}: {state}", style="bold"))
        grey = "bright_black" if row.label is None else ""
        text = Text()
        for part in row.parts:
            text.append(f"{begin}{part.text}{end}" if part.learnt else part.text, "" if part.learnt else grey)
            if part.learnt and part.weight != 1:
                text.append(f"(x {part.weight:g})", "bold yellow")
        console.print(text)
    console.print(Text(f"--- all rows: {report}", style="bold"))
