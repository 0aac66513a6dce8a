"""`shardproof infer` with a model that embeds texts (one, those typed in, or the rows of files) or ranks them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.cli.infer_asked import InferConfig, asked, files_of, question_of
from shardproof.cli.infer_labels import OF_PLUGINS, WRITING, refuse_options
from shardproof.cli.infer_rows import follow
from shardproof.data.forms.parts import KINDS
from shardproof.errors import ConfigError

if TYPE_CHECKING:
    from shardproof.train.embedding.pooling import Embedding
    from shardproof.train.options.config import SftConfig
    from shardproof.train.reranker.scoring import Scoring

TEMPLATES = ("chat_template", "template_variables")


def embed(
    folder: Path, embedding: Embedding, config: InferConfig, system: str | None, stage: int | None, media: SftConfig
) -> int:
    """`media`: the options about files. Returns the exit code."""
    from shardproof.train.embedding.embedder import Embedder, embed_rows

    refuse_options(config, (*WRITING, *OF_PLUGINS, *TEMPLATES), f"the model in {folder} embeds texts unchanged")
    model = Embedder(folder, embedding, system, config.trust_remote_code, stage, media)
    if not model.takes_files:
        refuse_options(config, KINDS, f"the model in {folder} reads text", "files")
    if config.dataset:
        file = Path(str(config.result_path)).expanduser()
        rounds = embed_rows(model, config.dataset, config.columns, file, config.batch_size, config.bad_rows)
        follow(rounds, model.first, file)
        return 0
    if config.prompt is not None:
        _show(model, question_of(config.prompt, files_of(config))["content"])
        return 0
    if model.first:
        print("Enter a text to get its embedding. An empty line or Ctrl-D quits.", flush=True)
    while text := model.shared(asked):
        _show(model, text)
    return 0


def rank(
    folder: Path,
    scoring: Scoring,
    config: InferConfig,
    system: str | None,
    stage: int | None,
    media: SftConfig,
) -> int:
    """For a model that scores how well texts answer a query. Returns the exit code."""
    from shardproof.data.encoding.judged import check_variables
    from shardproof.train.reranker.ranker import AskedRanker, Ranker, rank_rows
    from shardproof.train.reranker.scoring import YesNo

    refuse_options(config, KINDS, f"the model in {folder} ranks what --dataset names", "files of a first question")
    refuse_options(config, (*WRITING, *OF_PLUGINS), f"the model in {folder} ranks texts")
    if isinstance(scoring, YesNo):
        check_variables(config.template_variables)
        if config.plain:
            raise ConfigError(f"--plain: the model in {folder} gets texts in its chat template. Leave it out.")
    if not config.dataset:
        raise ConfigError(f"The model in {folder} ranks texts for a query: give rows with both in --dataset.")
    how = (config.trust_remote_code, config.chat_template, config.template_variables, config.plain)
    if isinstance(scoring, YesNo):
        model: Ranker = AskedRanker(folder, scoring, system, *how, stage, media)
    else:
        model = Ranker(folder, scoring, system, *how, stage, media)
    file = Path(str(config.result_path)).expanduser()
    follow(
        rank_rows(model, config.dataset, config.columns, file, config.batch_size, config.bad_rows), model.first, file
    )
    return 0


def _show(model: Any, content: str | list[dict[str, Any]]) -> None:
    from shardproof.train.embedding.embedder import rounded, single

    (found,) = model.embeddings([single(content)])
    if model.first:
        print(json.dumps(rounded(found[0])), flush=True)
