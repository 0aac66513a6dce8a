"""The options about rows and their files."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardproof.data.sources.mixture import Stopping
from shardproof.train.options.model_options import ModelOptions
from shardproof.train.options.option import Finite, Texts, option


class DataOptions(ModelOptions):
    """Which rows are read, what becomes of them, and how much of their files is taken."""

    dataset: list[str] = option(
        "Data", [], "required: JSONL, JSON, CSV, TSV, Parquet files, or OWNER/NAME on the hub; X#99: 99 rows; 'stdlib'"
    )
    interleave_prob: list[Annotated[float, Field(gt=0, le=1)]] = option(
        "Data", [], "mix datasets: the share of rows from each --dataset, 0.7 0.3 (default: all rows of all)"
    )
    stopping_strategy: Stopping = option(
        "Data", "first_exhausted", "with --interleave-prob: end an epoch when the first dataset runs out, or the last"
    )
    val_dataset: list[str] = option("Data", [], "datasets to evaluate on, named as those of --dataset")
    cached_dataset: list[str] = option(
        "Data", [], "folders that 'shardproof data encode' has written, beside or instead of --dataset; DIR#99: 99 rows"
    )
    cached_val_dataset: list[str] = option("Data", [], "such folders to evaluate on")
    val_split: float = option(
        "Data", 0.0, "share of the rows to hold out for evaluation, instead of --val-dataset", ge=0, lt=1
    )
    columns: dict[str, str] = option("Data", {}, "fields of other names in the files: query=question,response=answer")
    model_name: list[str] = option(
        "Data", [], "what rows of self-cognition say instead of {{NAME}}: a name, or a Chinese and an English one"
    )
    model_author: list[str] = option("Data", [], "the same of {{AUTHOR}}: who made the model")
    bad_rows: Literal["stop", "skip"] = option(
        "Data", "stop", "at a bad row, stop the run, or skip the row and list it in skipped.txt"
    )
    max_length: int = option("Data", 1024, "longest row in tokens", ge=2)
    truncation: Literal["drop", "right", "left", "split", "raise"] = option(
        "Data", "drop", "longer rows: leave out, cut at the end or beginning, split (raw text only), or an error"
    )
    system: str | None = option("Data", None, "system message for rows that have none")
    chat_template: str | None = option(
        "Data", None, "'chatml', a file with a Jinja template, or the template itself (default: the tokenizer's)"
    )
    agent_template: str | None = option(
        "Data",
        None,
        "how tools, calls and results are written: hermes, react_en, react_zh ... (default: as by the template)",
    )
    template_variables: Texts = option(
        "Data", {}, "variables of the chat template, in training and in the saved model: enable_thinking=false"
    )

    media_root: str | None = option(
        "Media", None, "folder that pictures, sounds and videos lie in (default: that of the dataset file)"
    )
    allow_remote_media: bool = option(
        "Media", False, "download files that rows name by http or https; without it such rows are bad"
    )
    remote_media_cache: str | None = option(
        "Media", None, "folder that keeps downloads, so that each file is downloaded once (default: at each use)"
    )
    max_pixels: int | None = option("Media", None, "scale pictures and frames of more pixels down to so many", ge=1)
    max_image_tokens: int | None = option(
        "Media", None, "the same by tokens: of pictures and frames that the model would get more of", ge=1
    )
    max_seconds: Finite = option("Media", 60.0, "longest sound or video; a longer one makes a bad row", gt=0)
    max_frame_pixels: int | None = option("Media", None, "the same of videos' frames (default: --max-pixels)", ge=1)
    max_frame_tokens: int | None = option(
        "Media", None, "tokens of a video's frame at most (default: --max-image-tokens)", ge=1
    )
    max_frames: int = option("Media", 16, "frames that are taken of a video at most, evenly spread", ge=1)
    fps: Finite | None = option(
        "Media", None, "frames per second that are taken of a video (default: as many as --max-frames)", gt=0
    )
    lost_files: Literal["skip", "stop"] = option(
        "Media", "skip", "when a file is gone or changed in mid-training, skip its row, or stop the run"
    )
    workers: int = option(
        "Media",
        2,
        "processes per rank that read and decode while training (before, all cores); 0: only the rank itself",
        ge=0,
    )
