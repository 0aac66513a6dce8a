"""`shardproof convert SOURCE FOLDER`: convert another engine's checkpoint into one of ours."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from shardproof.cli import options
from shardproof.cli.quiet import after_imports, before_imports


class ConvertConfig(BaseModel):
    """The options of `shardproof convert`."""

    model_config = ConfigDict(extra="forbid")

    debug: bool = Field(False, description="show tracebacks")


def parser() -> options.Parser:
    """The option table of the command."""
    made = options.parser_for(
        ConvertConfig,
        "shardproof convert",
        "shardproof convert SOURCE FOLDER",
        "Convert a checkpoint of DeepSpeed (ZeRO 1, 2, 3), FSDP2 or Accelerate into one that shardproof resumes from: "
        "master weights, optimizer state, buffers, scheduler.",
    )
    made.add_argument("source", metavar="SOURCE", help="the folder that the other engine wrote")
    made.add_argument("folder", metavar="FOLDER", help="where to write to")
    return made


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    found = options.parse(parser(), argv)
    source, folder = found.pop("source"), found.pop("folder")
    options.build(ConvertConfig, found)
    before_imports(True, False)
    from shardproof.checkpoint.convert import convert, described
    from shardproof.report.terminal import table

    after_imports(False)
    converted, lost = convert(source, folder)
    print(table(described(converted)))
    if lost:
        print(f"left out, because our checkpoints cannot hold them: {', '.join(lost)}")
    print(f"checkpoint: {folder}")
    return 0
