"""`shardproof infer RUN_DIR`: talk to the model of a run."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from shardproof.cli import options
from shardproof.cli.infer_asked import InferConfig, asked, files_of, question_of
from shardproof.cli.precision import check_devices
from shardproof.cli.processes.launch import launch, outer_world
from shardproof.cli.quiet import after_imports, before_imports
from shardproof.data.media.limits import EITHER, LIMITS
from shardproof.errors import ConfigError, DataError

VLLM = "vllm"
OF_VLLM = "vllm_max_model_len", "vllm_gpu_memory_utilization"
STAGE = 3  # used when several processes hold the model
PATIENCE = timedelta(days=7)  # how long ranks wait for the user's input


def parser() -> options.Parser:
    """The option table of the command."""
    made = options.parser_for(
        InferConfig,
        "shardproof infer",
        "shardproof infer RUN_DIR [options]",
        "Talk to the model of a run, or have it answer the rows of a dataset.",
    )
    made.add_argument(
        "run_dir", metavar="RUN_DIR", help="the output folder of a run, a model folder, or OWNER/NAME on the hub"
    )
    return made


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    found = options.parse(parser(), argv, command="infer")
    run_dir = found.pop("run_dir")
    said = options.from_variables(InferConfig, os.environ, bool(outer_world()))
    if "dataset" not in found:
        said.pop("media_root", None)
    config = options.build(InferConfig, said | found)
    config.system = options.system_message(config.system)
    if config.prompt is not None:
        config.prompt = options.whole_text("--prompt", config.prompt)
    _check(config)
    from shardproof.cli.hub import run_or_model
    from shardproof.train.answers.loaded import model_folder
    from shardproof.train.folder import recorded_in

    given, run_dir = run_dir, run_or_model(run_dir)
    folder = model_folder(run_dir)
    before_imports(_offline(folder, config), config.verbose)
    after_imports(config.verbose)
    of_run = recorded_in(Path(run_dir).expanduser())
    system = config.system if config.system is not None else of_run.get("system")
    bounds = {name: pair for pair in EITHER for name in pair}
    bounded = {name for name in LIMITS if getattr(config, name) is not None}
    for name in LIMITS:
        if bounded.isdisjoint(bounds.get(name, (name,))):  # files are read as they were in training
            setattr(config, name, of_run.get(name))
    if config.dataset and config.result_path is None:
        name = f"{datetime.now():%Y%m%d-%H%M%S}.jsonl"
        beside = Path(run_dir).expanduser() if run_dir == given else Path()  # not into the cache of a hub
        config.result_path = str(beside / "answers" / name)
    if outer_world():
        return _rank(folder, config, system)
    if config.nproc > 1 and config.backend != VLLM:
        check_devices(config.nproc)
        import shardproof.integrations.transformers  # noqa: F401  (once, before ranks are forked)
        from shardproof.models.loading.classes import import_class

        import_class(str(folder))
        return launch(_rank, (folder, config, system), config.nproc, config.debug)
    return _talk(folder, config, system, None)


def _check(config: InferConfig) -> None:
    """Refuse options that contradict each other."""
    asked = [name for name in ("prompt", "image", "audio", "video") if getattr(config, name)]
    if config.dataset and asked:
        raise ConfigError(f"--dataset and --{asked[0]} cannot be used together. Give one of them.")
    for name in ("result_path", "columns", "row_format", "bad_rows", "answer_metrics", "media_root", "batch_size"):
        if getattr(config, name) != InferConfig.model_fields[name].default and not config.dataset:
            raise ConfigError(f"{options.flag(name)} applies to the rows of --dataset: add --dataset, or leave it out.")
    _check_backend(config)
    if config.answer_metrics:
        from shardproof.train.answers.metrics import check_names

        check_names(config.answer_metrics)
    for name in ("chat_template", "agent_template", "template_variables", "response_prefix"):
        if config.plain and getattr(config, name):
            raise ConfigError(f"--plain leaves the chat template out, and {options.flag(name)} needs it.")
    if config.chat_template:
        from shardproof.data.encoding.template_syntax import check_template

        check_template(config.chat_template)
    if config.agent_template:
        from shardproof.data.encoding.agents import check_agent

        check_agent(config.agent_template)


def _check_backend(config: InferConfig) -> None:
    """Refuse options that the backend does not support."""
    if config.backend != VLLM:
        if given := next((name for name in OF_VLLM if getattr(config, name) is not None), None):
            raise ConfigError(f"{options.flag(given)} needs --backend vllm.")
        return
    from shardproof.train.answers.by_vllm import check_vllm

    others = ("image", "audio", "video", "external_plugins", "model_type")
    if given := next((name for name in others if getattr(config, name)), None):
        raise ConfigError(
            f"--backend vllm takes text only, and only models that vLLM supports itself: leave {options.flag(given)} "
            "out."
        )
    if config.num_beams > 1:
        raise ConfigError("--backend vllm does not support beam search: leave --num-beams or --backend out.")
    if outer_world():
        raise ConfigError("--backend vllm starts its processes itself: leave the launcher out, and give --nproc.")
    check_vllm()


def _rank(folder: Path, config: InferConfig, system: str | None) -> int:
    """The work of each of several processes: hold a part of the model, and generate with the others. The first one
    talks to the user."""
    import torch

    from shardproof.zero.comm.world import start_group

    before_imports(_offline(folder, config), config.verbose)  # a spawned process starts afresh
    after_imports(config.verbose)
    start_group(timeout=PATIENCE)
    if torch.distributed.get_rank() == 0:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  (multiprocessing has closed ours)
    _talk(folder, config, system, STAGE)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


def _talk(folder: Path, config: InferConfig, system: str | None, stage: int | None) -> int:
    import torch

    from shardproof.plugins import load
    from shardproof.train.answers.chat import Chat
    from shardproof.train.answers.loaded import loaded_as
    from shardproof.train.answers.metrics import answer_metrics
    from shardproof.train.answers.sampling import Sampling
    from shardproof.train.embedding.pooling import embedding_in
    from shardproof.train.options.config import SftConfig
    from shardproof.train.reranker.scoring import ByHead, scoring_in
    from shardproof.train.rows.media import check_media_root
    from shardproof.train.seq_cls.labelling import RELEVANCE, labels_in

    if not config.verbose:  # keep the engine's messages out of the answers
        logging.getLogger("shardproof.zero").setLevel(logging.ERROR)
    of_files = {name: getattr(config, name) for name in ("media_root", *LIMITS)}
    media = SftConfig(**{name: value for name, value in of_files.items() if value is not None})
    check_media_root(media)
    labels = labels_in(folder)
    scoring = ByHead() if labels == RELEVANCE else scoring_in(folder)
    if config.backend == VLLM and (scoring, labels, embedding_in(folder)) != (None, None, None):
        raise ConfigError(f"--backend vllm writes answers, and the model in {folder} does not: leave --backend out.")
    if scoring is not None:
        from shardproof.cli.infer_embeddings import rank

        return rank(folder, scoring, config, system, stage, media)
    if labels is not None:
        from shardproof.cli.infer_labels import give_labels

        return give_labels(folder, labels, config, system, stage, media)
    if (embedding := embedding_in(folder)) is not None:
        from shardproof.cli.infer_embeddings import embed

        return embed(folder, embedding, config, system, stage, media)
    _check_drawn(config)
    if config.plain and config.system:
        raise ConfigError(
            "--plain and --system cannot be used together: --plain continues the prompt alone. Give one of them."
        )
    plugins = load(config.external_plugins)
    worth = answer_metrics(config.answer_metrics, plugins)
    row_format = (config.row_format, plugins.find("row format", config.row_format)) if config.row_format else None
    how = (config.trust_remote_code, config.chat_template, config.template_variables, config.plain)
    opens: Any = {"agent": config.agent_template, "prefix": config.response_prefix}
    if config.backend == VLLM:
        from shardproof.train.answers.by_vllm import AT_ONCE, ByVllm

        longest, memory = config.vllm_max_model_len, config.vllm_gpu_memory_utilization
        chat: Chat = ByVllm(folder, *how, processes=config.nproc, longest=longest, memory=memory, **opens)
        config.batch_size = config.batch_size if "batch_size" in config.model_fields_set else AT_ONCE
    else:
        kind = loaded_as(folder, plugins, config.model_type)
        chat = Chat(folder, *how, plugins, kind, stage, media, **opens)
    if config.seed is not None:
        torch.manual_seed(config.seed)
    sampling = Sampling(**{field.name: getattr(config, field.name) for field in fields(Sampling)})
    history: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    if config.dataset:
        from shardproof.cli.infer_rows import answer

        return answer(chat, config, system, sampling, worth, row_format)
    files = files_of(config)
    stream = config.stream and config.num_beams == 1 and config.backend != VLLM  # beams decide at the end
    if config.prompt is not None:
        _answer(chat, [*history, question_of(config.prompt, files)], sampling, stream)
        return 0
    if files:  # find a bad file now, not at the first question
        chat.check([*history, question_of("?", files)])
    return _converse(chat, history, sampling, stream, files)


def _check_drawn(config: InferConfig) -> None:
    """Refuse sampling options without sampling."""
    if config.temperature:
        return
    if config.top_p < 1:
        raise ConfigError(f"--top-p {config.top_p:g} applies to sampling: add a --temperature above 0.")
    for name in ("top_k", "seed"):
        if (value := getattr(config, name)) is not None:
            raise ConfigError(f"{options.flag(name)} {value} applies to sampling: add a --temperature above 0.")


def _converse(
    chat: Any, history: list[dict[str, Any]], sampling: Any, stream: bool, files: dict[str, list[str]]
) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (history and editing in input())
    if chat.first:
        ends = "an answer" if not chat.sharded else "the conversation"
        print(f"An empty line or Ctrl-D quits, /new starts over, Ctrl-C ends {ends}.", flush=True)
    system = list(history)
    again = chat.shared(sys.stdin.isatty)  # a script has to see a question fail
    while True:
        question = chat.shared(asked)
        if not question:
            return 0
        if question == "/new":
            history = list(system)
            continue
        seen = files if history == system else {}
        try:
            turns = [*history, question_of(question, seen)]
            history = [*turns, {"role": "assistant", "content": _answer(chat, turns, sampling, stream)}]
        except KeyboardInterrupt:  # ends the answer, not the conversation
            print()
        except (ConfigError, DataError) as error:  # nor does a question that the model cannot take
            if not again:
                raise
            if chat.first:
                print(f"error: {error}", file=sys.stderr, flush=True)


def _answer(chat: Any, messages: list[dict[str, Any]], sampling: Any, stream: bool) -> str:
    """The answer; the first rank prints it."""
    text = chat.answer(messages, sampling) if not (stream and chat.first) else ""
    if chat.first and not stream:
        print(text, flush=True)
    elif chat.first:
        pieces = []
        for piece in chat.stream(messages, sampling):
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
        print(flush=True)
        text = "".join(pieces).strip()
    if chat.first and not text.strip():
        written = chat.written.replace("\n", "\\n")
        print(f"(an answer without text: the model wrote {written})", file=sys.stderr, flush=True)
    shared: str = chat.shared(lambda: text)
    return shared


def _offline(folder: Path, config: InferConfig) -> bool:
    """Whether everything needed is on this machine; the base model of an adapter, or rows, may not be."""
    from shardproof.cli.hub import all_here
    from shardproof.train.folder import ADAPTER, base_of
    from shardproof.train.model.loading import check_base

    base = [base_of(folder)] if (folder / ADAPTER).is_file() else []
    for model in base:
        check_base(folder, model, folder / ADAPTER)
    return all_here(base, config.dataset)
