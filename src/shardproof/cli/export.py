"""`shardproof export RUN FOLDER`: write the model of a run as an ordinary model folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from shardproof.cli import options
from shardproof.cli.quiet import after_imports, before_imports
from shardproof.errors import ConfigError
from shardproof.train.options.option import flag
from shardproof.train.packing.kinds import GROUP, Packing, Quantize

if TYPE_CHECKING:
    from shardproof.train.export import Exported
    from shardproof.train.packing.packer import Packed


class ExportConfig(BaseModel):
    """The options of `shardproof export`."""

    model_config = ConfigDict(extra="forbid")

    dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        None, description="dtype of the written weights (default: as they are)"
    )
    max_shard_size: str = Field("5GB", description="largest size of a file of weights")
    quantize: Quantize | None = Field(
        None,
        description="pack the weights: fp8 and int8 (computed in eight bits), int4 (groups share a scale), nf4 "
        "(bitsandbytes)",
    )
    group_size: int = Field(GROUP, description="with int4: number of weights in a row that share a scale", ge=16)
    keep: list[str] = Field(
        [], description="with --quantize: regular expressions for names of further weights to leave as they are"
    )
    dataset: list[str] = Field(
        [], description="with int4 and int8: rows to calibrate with (GPTQ); with any kind: rows whose loss is reported"
    )
    val_dataset: list[str] = Field(
        [], description="rows whose loss is reported, before and after, instead of those of --dataset"
    )
    columns: dict[str, str] = Field(
        {}, description="columns under other names in the rows: query=question,response=answer"
    )
    samples: int = Field(256, description="use at most this many of these rows", ge=1)
    max_length: int | None = Field(
        None, description="cut these rows to this many tokens (default: as in the run, or 2048)", ge=2
    )
    system: str | None = Field(None, description="system message for rows that have none (default: as in the run)")
    media_root: str | None = Field(
        None, description="folder of the files that rows name (default: that of the dataset)"
    )
    max_pixels: int | None = Field(None, description="scale images and frames down to at most this many pixels", ge=1)
    max_frame_pixels: int | None = Field(None, description="scale video frames down to at most this many pixels", ge=1)
    max_image_tokens: int | None = Field(
        None, description="scale images and frames down to at most this many tokens", ge=1
    )
    max_frame_tokens: int | None = Field(None, description="scale video frames down to at most this many tokens", ge=1)
    max_frames: int | None = Field(None, description="most frames taken from a video", ge=1)
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    external_plugins: list[str] = Field([], description="your own Python files that register the model")
    model_type: str | None = Field(
        None, description="load it as this plugin model (default: as in the run, or what its config says)"
    )
    push_to_hub: str | None = Field(
        None, description="also upload it: OWNER/NAME on the Hugging Face hub, MS::OWNER/NAME on ModelScope"
    )
    private: bool = Field(False, description="with --push-to-hub: make a new repository private")
    hub_token: str | None = Field(
        None, description="with --push-to-hub: access token (default: HF_TOKEN, or that of 'hf auth login')", repr=False
    )
    verbose: bool = Field(False, description="also show messages of libraries")
    debug: bool = Field(False, description="show tracebacks")

    @field_validator("max_shard_size")
    @classmethod
    def _has_a_unit(cls, value: str) -> str:
        if not re.fullmatch(r"\d+(\.\d+)?[KMGT]B", value, re.IGNORECASE):
            raise ValueError("give a size with its unit, such as 500MB or 2GB")
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
    packing = _packing(config)
    for name in ("private", "hub_token"):
        if getattr(config, name) and config.push_to_hub is None:
            raise ConfigError(f"{flag(name)} needs --push-to-hub OWNER/NAME.")
    before_imports(False, config.verbose)
    from shardproof.cli.hub import run_or_model
    from shardproof.cli.push import target
    from shardproof.data.encoding.beside import telling
    from shardproof.models.scorers import made_here
    from shardproof.plugins import load
    from shardproof.report.terminal import Share
    from shardproof.train.export import export

    after_imports(config.verbose)
    goal = target(config.push_to_hub, config.private, config.hub_token) if config.push_to_hub is not None else None
    source = run_or_model(source)
    plugins = load(config.external_plugins)
    how = config.dtype, config.max_shard_size, config.trust_remote_code
    with Share("encoding rows") as told, telling(told):
        done = export(source, folder, *how, plugins, config.model_type, packing)
    merged = (
        f"; merging moved logits by {done.merged_error:.1g} of the largest" if done.merged_error is not None else ""
    )
    print(f"weights: {done.folder} ({done.size / 1e6:,.1f} MB in {done.files} file(s))")
    what = "it computes" if done.packed is None else "before it was packed, it computed"
    print(f"checked: loaded again, {what} the same logits{merged}")
    if done.packed is not None:
        _tell_packed(done.packed, done.size)
    if kind := made_here(done.folder):
        print(f"transformers has no {kind}: shardproof.models.scorers.load_scorer loads it")
    if done.further:
        print(f"MTP: {done.further} tensors of multi-token prediction layers, unchanged from the base")
    if done.max_pixels is not None:
        print(f"images: {_scaling(done)}")
    if goal is not None:
        print(f"pushed: {goal.push(done.folder)}")
    return 0


OF_PICTURES = ("max_pixels", "max_frame_pixels", "max_image_tokens", "max_frame_tokens")
READING = ("columns", "max_length", "system", "media_root", *OF_PICTURES, "max_frames")
WITH = ("group_size", "keep", "dataset", "val_dataset", "samples", *READING)


def _packing(config: ExportConfig) -> Packing | None:
    """What --quantize asks for.

    Raises:
        ConfigError: an option for it is given without it, or with a kind that does not take it.
    """
    given = [name for name in WITH if name in config.model_fields_set]
    if config.quantize is None:
        if given:
            raise ConfigError(f"{flag(given[0])} applies to packed weights: add --quantize int4, or leave it out.")
        return None
    if config.dtype == "fp32":
        raise ConfigError(
            f"--dtype fp32 and --quantize {config.quantize}: packed weights are computed in 16 bits, and weights that "
            "are not packed are kept in 16 bits. Leave --dtype out, or use bf16 or fp16."
        )
    if "group_size" in given and config.quantize != "int4":
        raise ConfigError(f"--group-size is for --quantize int4: the scales of {config.quantize} have a fixed layout.")
    return Packing(
        config.quantize,
        config.group_size,
        keep=tuple(config.keep),
        dataset=tuple(config.dataset),
        val_dataset=tuple(config.val_dataset),
        reading={name: getattr(config, name) for name in READING if name in config.model_fields_set},
        samples=config.samples,
    )


def _tell_packed(packed: Packed, size: int) -> None:
    """Print what was packed, the size, and the cost in accuracy."""
    rows = f", calibrated with {packed.calibrated:,} rows" if packed.calibrated else ""
    print(
        f"packed: {packed.layers:,} linear layers of the language model's blocks ({packed.kind}{rows});"
        " embedding, head, routers and towers are unchanged"
    )
    share = size / packed.size_before
    print(f"size: {packed.size_before / 1e6:,.1f} MB before, {size / 1e6:,.1f} MB after ({share:.0%})")
    if packed.before is not None and packed.after is not None:
        print(f"cost: {packed.before.told(packed.after)} ({packed.before.rows:,} rows)")
    else:
        print(f"cost: logits of 16 tokens moved by {packed.moved:.2g} of the largest (--val-dataset reports the loss)")


def _scaling(done: Exported) -> str:
    """What became of the run's --max-pixels."""
    if done.scaled is not None:
        return f"the processor scales them down to {done.scaled:,} pixels, as the run did (not video frames)"
    return (
        f"the processor has no pixel limit to hold the run's --max-pixels {done.max_pixels}; scale images down before "
        "you pass them to another program"
    )
