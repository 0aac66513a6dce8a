"""How a reranker scores a pair of a query and a text: with a head, or by whether a causal language model would answer
"yes" or "no"; and the files of a model folder that describe this.

The files are those of sentence-transformers, whose CrossEncoder therefore gives the same scores, and whose models can
be used as they are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardproof.data.encoding.judged import JudgedEncoder, Write, prompt, take_pairs, word_token
from shardproof.data.encoding.rank import PairEncoder
from shardproof.data.media.embed import MediaMatchEncoder
from shardproof.data.media.judged import MediaJudgedEncoder, written
from shardproof.data.media.labelled import MediaPairEncoder
from shardproof.data.media.limits import Limits
from shardproof.errors import ConfigError
from shardproof.models.forward import without_adapters
from shardproof.models.loading.processors import said_by
from shardproof.models.scorers import last_places
from shardproof.train.embedding.pooling import CONFIG, MODULES, TRANSFORMER, files_in
from shardproof.train.model.loading import TINY, load_model, tokenizer_of
from shardproof.train.model.parts import head_for_words
from shardproof.train.reranker.recipe import GENERATIVE
from shardproof.train.rows.media import files_taken
from shardproof.train.seq_cls import recipe as seq_cls
from shardproof.train.seq_cls.labelling import RELEVANCE, write_labels

if TYPE_CHECKING:
    from shardproof.train.options.config import SftConfig

SCORE = "1_LogitScore/config.json"


class ByHead:
    """Scores with the single label of a classifier."""

    def encoder(self, tokenizer: Any, system: str | None) -> PairEncoder:
        return PairEncoder(tokenizer, system)

    def media_encoder(self, processor: Any, limits: Limits, system: str | None) -> MediaMatchEncoder:
        """The encoder for a model that takes files."""
        return MediaPairEncoder(processor, limits, system)

    def build(self, config: SftConfig, source: str, tokenizer: Any) -> Any:
        """The model of a run, with its adapters."""
        return seq_cls.build(config, source, tokenizer, to_shard=True)

    def scores(self, outputs: Any) -> torch.Tensor:
        """Scores in fp32, of shape (pairs,); the sigmoid of a score is the probability that the text answers the
        query."""
        found: torch.Tensor = outputs["logits"].float()[:, 0]
        return found

    def write(self, folder: Path) -> None:
        """Write the label beside adapters; a full model has it in its config."""
        write_labels(folder, RELEVANCE)


@dataclass(frozen=True)
class YesNo:
    """Scores with the logits of two tokens after the prompt of a pair: that of `yes` minus that of `no`, so that the
    sigmoid equals the softmax over the two.

    Attributes:
        system: the instruction for pairs without their own.
        files: the kinds of files that the model takes besides texts.
    """

    yes: int
    no: int
    system: str | None = None
    files: tuple[str, ...] = ()

    def encoder(self, tokenizer: Any, system: str | None) -> PairEncoder:
        return JudgedEncoder(tokenizer, self.system if system is None else system)

    def media_encoder(self, processor: Any, limits: Limits, system: str | None) -> MediaMatchEncoder:
        """The encoder for a model that takes files."""
        return MediaJudgedEncoder(processor, limits, self.system if system is None else system)

    def build(self, config: SftConfig, source: str, tokenizer: Any) -> Any:
        model = seq_cls.trained(load_model(source, config, to_shard=True), config, None)
        last_logits_only(model)
        return model

    def scores(self, outputs: Any) -> torch.Tensor:
        logits = outputs["logits"]
        if logits.shape[1] != 1:
            raise ConfigError(
                f"--task {GENERATIVE}: the logits of this model are not made by its output embeddings alone, so they"
                f" cannot be limited to the last token. --task reranker does not need them."
            )
        both: torch.Tensor = logits[:, 0, [self.yes, self.no]].float()
        return both[:, 0] - both[:, 1]

    def write(self, folder: Path) -> None:
        """Write this in the format of sentence-transformers."""
        names = {
            "": "base.modules.transformer.Transformer",
            "1_LogitScore": "cross_encoder.modules.logit_score.LogitScore",
        }
        read = {"method": "forward", "method_output_name": "logits"}
        prompts = {"query": self.system} if self.system else {}
        files: dict[str, Any] = {
            MODULES: [
                {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{name}"}
                for i, (path, name) in enumerate(names.items())
            ],
            SCORE: {"true_token_id": self.yes, "false_token_id": self.no},
            CONFIG: {
                "model_type": "CrossEncoder",
                "prompts": prompts,
                "default_prompt_name": next(iter(prompts), None),
            },
            TRANSFORMER: {
                "transformer_task": "any-to-any" if self.files else "text-generation",
                "modality_config": {
                    **dict.fromkeys(("text", *self.files), read),
                    "message": {**read, "format": "structured" if self.files else "flat"},
                },
                "module_output_name": "causal_logits",
                "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
            },
        }
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


Scoring = ByHead | YesNo


def scoring_of(config: SftConfig, processing: Any) -> Scoring:
    """How the model of a run scores pairs; prepares its tokenizer or processor for them. The answer tokens are those in
    the model's files, if there are any.

    Raises:
        ConfigError: the tokenizer does not support this.
    """
    if config.task != GENERATIVE:
        return ByHead()
    name = config.begins_with
    write = take_files_in_pairs(processing, name)
    known = {} if name == TINY else said_by(name, SCORE)
    if known:
        return _yes_no(known, config.system, files_taken(processing), name)
    yes, no = (word_token(tokenizer_of(processing), word, name, write) for word in ("yes", "no"))
    return YesNo(yes, no, config.system, files_taken(processing))


def take_files_in_pairs(processing: Any, name: str) -> Write:
    """Prepare a tokenizer for pairs, or a processor for pairs with files. Returns the function that writes them."""
    tokenizer = tokenizer_of(processing)
    write = prompt if tokenizer is processing else written
    take_pairs(tokenizer, name, write)
    processing.chat_template = tokenizer.chat_template
    return write


def scoring_in(folder: Path) -> YesNo | None:
    """How the model in a folder scores pairs by its answer, or None for a model without such files."""
    if not (folder / MODULES).is_file() or not (folder / SCORE).is_file():
        return None
    said, more, how = (
        json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        for file in (folder / SCORE, folder / CONFIG, folder / TRANSFORMER)
    )
    system = (more.get("prompts") or {}).get(more.get("default_prompt_name"))
    return _yes_no(said, system, files_in(how), str(folder))


def _yes_no(said: dict[str, Any], system: str | None, files: tuple[str, ...], model: str) -> YesNo:
    yes, no = said.get("true_token_id"), said.get("false_token_id")
    if yes is None or no is None:
        raise ConfigError(
            f"The model {model} scores pairs with the logit of one token ({SCORE}), and this task compares two."
        )
    return YesNo(yes, no, system, files)


def last_logits_only(model: Any) -> None:
    """Have a causal language model compute only the logits of the last token of each row, of shape (rows, 1,
    vocabulary).

    Its own changes to logits (a scale, a cap, adapters on its head) apply to these as well. Rows are padded on the
    right, where no position depends on padding, so their last tokens are at different positions.
    """
    head = head_for_words(model)
    if head is None:
        raise ConfigError(f"A {type(without_adapters(model)).__name__} has no output embeddings to answer with.")
    places: list[torch.Tensor | None] = [None]

    def note(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        places[0] = None if mask is None else last_places(mask)

    def choose(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, place = args[0], places[0]
        if place is None:
            return hidden[:, -1:], *args[1:]
        rows = torch.arange(len(hidden), device=hidden.device)
        return hidden[rows, place.to(hidden.device)].unsqueeze(1), *args[1:]

    model.register_forward_pre_hook(note, with_kwargs=True)
    head.register_forward_pre_hook(choose)
