"""Options for rows and their files."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardproof.data.sources.mixture import Stopping
from shardproof.train.options.model_options import ModelOptions
from shardproof.train.options.option import Finite, Texts, option


class DataOptions(ModelOptions):
    """Which rows are read, how they are processed, and how much of their files is used."""

    dataset: list[str] = option(
        "Data", [], "required: JSONL, JSON, CSV, TSV, Parquet files, or OWNER/NAME on the hub; X#99: 99 rows; 'stdlib'"
    )
    interleave_prob: list[Annotated[float, Field(gt=0, le=1)]] = option(
        "Data", [], "mix datasets: share of rows from each --dataset, such as 0.7 0.3 (default: all rows of each)"
    )
    stopping_strategy: Stopping = option(
        "Data", "first_exhausted", "with --interleave-prob: end an epoch when the first dataset runs out, or the last"
    )
    val_dataset: list[str] = option("Data", [], "datasets to evaluate on, in the same forms as --dataset")
    cached_dataset: list[str] = option(
        "Data", [], "folders written by 'shardproof data encode', beside or instead of --dataset; DIR#99: 99 rows"
    )
    cached_val_dataset: list[str] = option("Data", [], "folders of this kind to evaluate on")
    val_split: float = option(
        "Data", 0.0, "share of the rows to hold out for evaluation, instead of --val-dataset", ge=0, lt=1
    )
    columns: dict[str, str] = option(
        "Data", {}, "columns under other names in the files: query=question,response=answer"
    )
    model_name: list[str] = option(
        "Data", [], "replaces {{NAME}} in self-cognition rows: a name, or a Chinese and an English one"
    )
    model_author: list[str] = option("Data", [], "replaces {{AUTHOR}} in the same way: who made the model")
    bad_rows: Literal["stop", "skip"] = option(
        "Data", "stop", "on a bad row, stop the run, or skip the row and list it in skipped.txt"
    )
    max_length: int = option("Data", 1024, "longest row in tokens", ge=2)
    truncation: Literal["drop", "right", "left", "split", "raise"] = option(
        "Data",
        "drop",
        "longer rows: drop, cut at the end (right) or beginning (left), split (raw text only), or raise an error",
    )
    system: str | None = option("Data", None, "system message for rows that have none")
    chat_template: str | None = option(
        "Data", None, "'chatml', a file with a Jinja template, or the template itself (default: the tokenizer's)"
    )
    agent_template: str | None = option(
        "Data",
        None,
        "format of tools, calls and results: hermes, react_en, react_zh ... (default: that of the chat template)",
    )
    template_variables: Texts = option(
        "Data", {}, "variables for the chat template, in training and in the saved model: enable_thinking=false"
    )

    media_root: str | None = option(
        "Media", None, "folder of the images, audio and videos (default: that of the dataset file)"
    )
    allow_remote_media: bool = option(
        "Media", False, "download files that rows give as http(s) URLs; otherwise such rows are bad"
    )
    remote_media_cache: str | None = option(
        "Media", None, "folder in which downloads are kept, so that each file is fetched once (default: at each use)"
    )
    max_pixels: int | None = option("Media", None, "scale images and frames down to at most this many pixels", ge=1)
    max_image_tokens: int | None = option(
        "Media", None, "scale images and frames down to at most this many tokens", ge=1
    )
    max_seconds: Finite = option(
        "Media", 60.0, "longest audio or video in seconds; a longer one makes the row bad", gt=0
    )
    max_frame_pixels: int | None = option(
        "Media", None, "scale video frames down to at most this many pixels (default: --max-pixels)", ge=1
    )
    max_frame_tokens: int | None = option(
        "Media", None, "scale video frames down to at most this many tokens (default: --max-image-tokens)", ge=1
    )
    max_frames: int = option("Media", 16, "most frames taken from a video, evenly spread", ge=1)
    fps: Finite | None = option(
        "Media", None, "frames taken per second of video (default: as many as --max-frames allows)", gt=0
    )
    lost_files: Literal["skip", "stop"] = option(
        "Media", "skip", "when a file disappears or changes during training, skip its row, or stop the run"
    )
    workers: int = option(
        "Media",
        2,
        "processes per rank that read and decode during training (before it: all cores); 0: the rank itself",
        ge=0,
    )
