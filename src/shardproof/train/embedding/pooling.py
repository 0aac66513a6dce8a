"""One vector per text from the vectors of its tokens, and the files of a model folder that describe how.

The files are those of sentence-transformers, which can therefore load models trained here, and whose models can be used
as they are. Its older names are written, which all of its releases read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from shardproof.data.forms.parts import KINDS
from shardproof.errors import ConfigError
from shardproof.models.loading.processors import content_of, said_by
from shardproof.models.scorers import last_places
from shardproof.train.model.loading import TINY

MODULES, CONFIG, POOLING = "modules.json", "config_sentence_transformers.json", "1_Pooling/config.json"
TRANSFORMER = "sentence_bert_config.json"
THEIR_NAMES = {"last": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}
NEWER_NAMES = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
KNOWN = ("Transformer", "Pooling", "Normalize")  # the modules of a model that are supported here


def pooled(hidden: torch.Tensor, mask: torch.Tensor, how: str) -> torch.Tensor:
    """Embeddings in fp32, each of length 1, of shape (texts, width).

    Args:
        hidden: the outputs of the last layer, (texts, length, width).
        mask: (texts, length), 1 for tokens; padding may be on either side.
        how: `last` uses the last token of a text, `cls` the first, `mean` the mean of all.
    """
    rows = torch.arange(len(hidden), device=hidden.device)
    if how == "mean":
        held = mask.unsqueeze(-1).float()
        found = (hidden.float() * held).sum(1) / held.sum(1)
    else:
        place = mask.argmax(1) if how == "cls" else last_places(mask)
        found = hidden[rows, place].float()
    return functional.normalize(found, dim=-1)


@dataclass(frozen=True)
class Embedding:
    """How the model in a folder embeds texts: the pooling, the prompt before queries (see `prompt_of`, where texts are
    encoded), the kinds of files it takes besides texts, and how many tokens of a text it reads."""

    pooling: str
    prompt: str | None = None
    files: tuple[str, ...] = ()
    longest: int | None = None

    def write(self, folder: Path, width: int) -> None:
        """Write this in the format of sentence-transformers."""
        kind = "sentence_transformers.models"
        names = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
        modules = [
            {"idx": i, "name": str(i), "path": path, "type": f"{kind}.{name}"} for i, (path, name) in enumerate(names)
        ]
        modes = {f"pooling_mode_{theirs}": ours == self.pooling for ours, theirs in THEIR_NAMES.items()}
        prompts = {"query": self.prompt, "document": ""} if self.prompt else {}
        files: dict[str, Any] = {
            MODULES: modules,
            POOLING: {"word_embedding_dimension": width, **modes, "include_prompt": True},
            CONFIG: {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"},
            TRANSFORMER: {"max_seq_length": self.longest, "do_lower_case": False, **self._of_files()},
        }
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")

    def _of_files(self) -> dict[str, Any]:
        """For a model that takes files: how it is called with texts and files."""
        if not self.files:
            return {}
        asked = {"method": "forward", "method_output_name": "last_hidden_state"}
        return {
            "transformer_task": "feature-extraction",
            "modality_config": {
                **dict.fromkeys(("text", *self.files), asked),
                "message": {**asked, "format": "structured"},
            },
            "module_output_name": "token_embeddings",
            "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
        }


def embedding_in(folder: Path) -> Embedding | None:
    """How the model in a folder embeds texts, or None for a model without such files.

    Raises:
        ConfigError: it does so in a way that is not supported here.
    """
    if not (folder / MODULES).is_file() or not (folder / POOLING).is_file():
        return None
    _check_modules(str(folder), "Such modules are not supported here: use sentence-transformers.")
    pooling = _pooling(json.loads((folder / POOLING).read_text(encoding="utf-8")), str(folder))
    said, how = (
        json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        for file in (folder / CONFIG, folder / TRANSFORMER)
    )
    prompt = (said.get("prompts") or {}).get("query") or None
    return Embedding(pooling, prompt, files_in(how), how.get("max_seq_length"))


def files_in(how: dict[str, Any]) -> tuple[str, ...]:
    """The kinds of files that a model takes, according to the file TRANSFORMER in its folder."""
    return tuple(kind for kind in how.get("modality_config") or () if kind in KINDS)


def _check_modules(model: str, way: str) -> None:
    """Raise ConfigError for a model with modules that are not supported here (EmbeddingGemma's `Dense`)."""
    names = [str(module.get("type", "")).rpartition(".")[2] for module in content_of(model, MODULES) or []]
    if more := sorted({*names} - {*KNOWN}):
        raise ConfigError(f"The model {model} also applies {', '.join(more)} to its vectors ({MODULES}). {way}")


def _pooling(said: dict[str, Any], model: str) -> str:
    newer = said.get("pooling_mode")
    on = [name.removeprefix("pooling_mode_") for name, value in said.items() if value is True and "_mode_" in name]
    known = NEWER_NAMES if newer else {theirs: ours for ours, theirs in THEIR_NAMES.items()}
    found = newer if newer else on[0] if len(on) == 1 else on
    if not isinstance(found, str) or found not in known:
        raise ConfigError(
            f"The model {model} pools with {found}, which is not supported. Set --pooling to one of"
            f" {', '.join(THEIR_NAMES)}."
        )
    return known[found]


def pooling_of(model: str) -> str:
    """The default pooling of a run: as in the sentence-transformers files beside the model, or else the last token for
    generative models, and the mean for others."""
    if model == TINY:
        return "last"
    found = said_by(model, POOLING)
    if found:
        _check_modules(model, "Such modules are not trained here: add --pooling mean to start without them.")
        return _pooling(found, model)
    classes = said_by(model, "config.json").get("architectures") or []
    writing = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    return "last" if any(name.endswith(writing) for name in classes) else "mean"
