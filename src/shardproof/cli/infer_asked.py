"""The options of `shardproof infer`, and the user's input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shardproof.cli import options
from shardproof.errors import ConfigError
from shardproof.train.options.option import Written


class InferConfig(BaseModel):
    """The options of `shardproof infer`."""

    model_config = ConfigDict(extra="forbid")

    prompt: str | None = Field(None, description="ask this once (default: a conversation)")
    image: list[str] = Field([], description="images for the first question")
    audio: list[str] = Field([], description="audio files for the first question")
    video: list[str] = Field([], description="videos for the first question")
    system: str | None = Field(None, description="system message (default: that of the run)")
    chat_template: str | None = Field(
        None, description="'chatml', a file with a Jinja template, or the template itself (default: the model's)"
    )
    agent_template: str | None = Field(
        None,
        description="format of tools, calls and results: hermes, react_en, react_zh ... (default: that of the model's"
        " template)",
    )
    response_prefix: Written = Field("", description="text that every answer starts with: '<think>\\n'")
    template_variables: dict[str, str] = Field({}, description="variables of the chat template: enable_thinking=false")
    plain: bool = Field(False, description="continue the prompt as it is, without a chat template")
    dataset: list[str] = Field(
        [], description="answer the rows of these datasets instead, and write the answers to a file"
    )
    columns: dict[str, str] = Field(
        {}, description="columns under other names in the files: query=question,response=answer"
    )
    row_format: str | None = Field(None, description="a plugin function that converts each row into a known form")
    bad_rows: Literal["stop", "skip"] = Field("stop", description="on a bad row, stop, or skip the row and list it")
    result_path: str | None = Field(
        None, description="JSON Lines file for the answers to --dataset (default: a new one in RUN_DIR/answers)"
    )
    answer_metrics: list[str] = Field(
        [],
        description="score the answers against those of the rows: exact_match, accuracy (of the final number), rouge_l,"
        " bleu, chrf, or a plugin's",
    )
    media_root: str | None = Field(
        None, description="folder of the files that rows name (default: that of the dataset file)"
    )
    max_pixels: int | None = Field(
        None, description="scale images and frames down to at most this many pixels (default: as in the run)", ge=1
    )
    max_image_tokens: int | None = Field(
        None, description="scale images and frames down to at most this many tokens", ge=1
    )
    max_frame_tokens: int | None = Field(None, description="scale video frames down to at most this many tokens", ge=1)
    max_seconds: float | None = Field(None, description="longest audio or video (default: as in the run, or 60)", gt=0)
    max_frame_pixels: int | None = Field(
        None,
        description="scale video frames down to at most this many pixels (default: as in the run, or --max-pixels)",
        ge=1,
    )
    max_frames: int | None = Field(
        None, description="most frames taken from a video (default: as in the run, or 16)", ge=1
    )
    fps: float | None = Field(
        None,
        description="frames taken per second of video (default: as in the run, or as many as --max-frames allows)",
        gt=0,
    )
    batch_size: int = Field(1, description="rows a process answers at once (default with --backend vllm: 512)", ge=1)
    backend: Literal["transformers", "vllm"] = Field(
        "transformers",
        description="what generates the answers: transformers, or vLLM for many rows at once (text, full models)",
    )
    vllm_max_model_len: int | None = Field(
        None, description="longest question plus answer, in tokens (default: the model's own limit)", ge=1
    )
    vllm_gpu_memory_utilization: float | None = Field(
        None, description="share of the GPU's memory that vLLM takes (default: vLLM's)", gt=0, le=1
    )
    max_new_tokens: int = Field(128, description="longest answer in tokens", ge=1)
    temperature: float = Field(0.0, description="sampling temperature; 0: always the likeliest token", ge=0)
    top_p: float = Field(
        1.0, description="sample from the likeliest tokens whose probabilities sum up to this", gt=0, le=1
    )
    top_k: int | None = Field(
        None,
        description="sample from this many of the likeliest tokens; 0: from all (default: from the model's"
        " generation_config, or 50)",
        ge=0,
    )
    repetition_penalty: float | None = Field(
        None,
        description="above 1, tokens that have occurred become less likely (default: from the model's"
        " generation_config, or 1)",
        gt=0,
        allow_inf_nan=False,
    )
    num_beams: int = Field(
        1, description="beam search with this many beams; the answer is shown when it is complete", ge=1
    )
    stop_words: list[Written] = Field([], description="strings at which an answer ends")
    seed: int | None = Field(None, description="seed for sampling (default: a new one each time)", ge=0)
    stream: bool = Field(True, description="show the answer while it is generated")
    nproc: int = Field(1, description="processes to shard the model over (with --backend vllm: GPUs)", ge=1)
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    external_plugins: list[str] = Field(
        [], description="your own Python files that register the model, the row format or answer metrics"
    )
    model_type: str | None = Field(
        None, description="load it as this plugin model (default: as in the run, or what its config says)"
    )
    verbose: bool = Field(False, description="also show messages of libraries")
    debug: bool = Field(False, description="show tracebacks")


def files_of(config: InferConfig) -> dict[str, list[str]]:
    """The files of the first question, by kind."""
    named = {"image": config.image, "audio": config.audio, "video": config.video}
    return {
        kind: [file if file.startswith("data:") else str(Path(file).expanduser().absolute()) for file in paths]
        for kind, paths in named.items()
        if paths
    }


def question_of(text: str, files: dict[str, list[str]]) -> dict[str, Any]:
    """A turn, with files at `<image>` and the like in the text, or before it."""
    from shardproof.data.forms.parts import Problem, with_files

    try:
        return with_files(files, [{"role": "user", "content": text}])[0]
    except Problem as problem:
        raise ConfigError(f"{problem}. Give one file per place, or leave the places out.") from None


def asked() -> str:
    """The user's input; empty at its end. On a terminal, the user is asked again after invalid UTF-8.

    Raises:
        ConfigError: it is not valid UTF-8, and comes from a file or a program.
    """
    while True:
        try:
            return options.whole_text("The line", input("you> ").strip())
        except EOFError:
            print()
            return ""
        except (UnicodeDecodeError, ConfigError) as error:
            why = ConfigError(f"The line is not valid UTF-8: {error}.") if isinstance(error, ValueError) else error
            if not sys.stdin.isatty():
                raise why from None
            print(f"error: {why}", file=sys.stderr, flush=True)
