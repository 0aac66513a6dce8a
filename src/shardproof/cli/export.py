"""`shardproof export RUN FOLDER`: the model of a run as an ordinary model folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from shardproof.cli import options
from shardproof.cli.quiet import after_imports, before_imports

if TYPE_CHECKING:
    from shardproof.train.export import Exported


class ExportConfig(BaseModel):
    """The options of `shardproof export`."""

    model_config = ConfigDict(extra="forbid")

    dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        None, description="dtype of the written weights (default: as they are)"
    )
    max_shard_size: str = Field("5GB", description="largest size of a file of weights")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    external_plugins: list[str] = Field([], description="Python files of your own that register the model")
    model_type: str | None = Field(
        None, description="load it as this model of a plugin (default: as in the run, or as its config says)"
    )
    verbose: bool = Field(False, description="show the messages of libraries, too")
    debug: bool = Field(False, description="show tracebacks")

    @field_validator("max_shard_size")
    @classmethod
    def _has_a_unit(cls, value: str) -> str:
        if not re.fullmatch(r"\d+(\.\d+)?[KMGT]B", value, re.IGNORECASE):
            raise ValueError("a size with its unit is meant, such as 500MB or 2GB")
        return value


def parser() -> options.Parser:
    """The option table of the command."""
    made = options.parser_for(
        ExportConfig,
        "shardproof export",
        "shardproof export RUN FOLDER [options]",
        "Write the model of a run, or of one of its checkpoints, to a folder that from_pretrained loads: adapters "
        "merged into their model, and the result loaded again and compared.",
    )
    made.add_argument(
        "source", metavar="RUN", help="a run folder, a model folder, a checkpoint of a run, or OWNER/NAME on the hub"
    )
    made.add_argument("folder", metavar="FOLDER", help="where to write to")
    return made


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    found = options.parse(parser(), argv, command="export")
    source, folder = found.pop("source"), found.pop("folder")
    config = options.build(ExportConfig, found)
    before_imports(False, config.verbose)
    from shardproof.cli.hub import run_or_model
    from shardproof.models.scorers import made_here
    from shardproof.plugins import load
    from shardproof.train.export import export

    source = run_or_model(source)
    after_imports(config.verbose)
    plugins = load(config.external_plugins)
    done = export(
        source, folder, config.dtype, config.max_shard_size, config.trust_remote_code, plugins, config.model_type
    )
    merged = (
        f"; merging moved logits by {done.merged_error:.1g} of the largest" if done.merged_error is not None else ""
    )
    print(f"weights: {done.folder} ({done.size / 1e6:,.1f} MB in {done.files} file(s))")
    print(f"checked: loaded again, it computes the same logits{merged}")
    if kind := made_here(done.folder):
        print(f"transformers has no {kind}: shardproof.models.scorers.load_scorer loads it")
    if done.further:
        print(f"MTP: {done.further} tensors of layers that predict further tokens, as the base has them")
    if done.max_pixels is not None:
        print(f"pictures: {_scaling(done)}")
    return 0


def _scaling(done: Exported) -> str:
    """What became of --max-pixels, which the run had."""
    if done.scaled is not None:
        return f"the processor scales them down to {done.scaled:,} pixels, as the run did (not frames of videos)"
    return (
        f"the processor has no limit of pixels to write the run's --max-pixels {done.max_pixels} into; scale them down"
        " before you give them to another program"
    )
