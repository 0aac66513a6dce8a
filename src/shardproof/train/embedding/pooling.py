"""One vector of a text out of the vectors of its tokens, and the files of a model folder that say how it is made.

The files are those of sentence-transformers, which so loads what is trained here, and whose models are taken as they
are. Its older names are written, which all of its releases read.
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
KNOWN = ("Transformer", "Pooling", "Normalize")  # what vectors are made by here, of the modules of a model


def pooled(hidden: torch.Tensor, mask: torch.Tensor, how: str) -> torch.Tensor:
    """Embeddings in fp32, of length 1 each, of shape (texts, width).

    Args:
        hidden: (texts, length, width), of the last layer.
        mask: (texts, length), 1 where there is a token; padding may stand on either side.
        how: `last` takes the last token of a text, `cls` the first, `mean` the mean of all.
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
    """How the model in a folder embeds texts: by which tokens, what stands before queries (see `prompt_of`, where texts
    are encoded), which kinds of files it takes beside them, and how many tokens of a text it reads."""

    pooling: str
    prompt: str | None = None
    files: tuple[str, ...] = ()
    longest: int | None = None

    def write(self, folder: Path, width: int) -> None:
        """Say so in the words of sentence-transformers."""
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
        """Of a model that takes files: by what it is asked for texts and files."""
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
    """How the model in a folder embeds texts, or None of a model that does not say that it does.

    Raises:
        ConfigError: it does so in a way that there is not here.
    """
    if not (folder / MODULES).is_file() or not (folder / POOLING).is_file():
        return None
    _check_modules(str(folder), "It cannot be asked here: sentence-transformers does so.")
    pooling = _pooling(json.loads((folder / POOLING).read_text(encoding="utf-8")), str(folder))
    said, how = (
        json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        for file in (folder / CONFIG, folder / TRANSFORMER)
    )
    prompt = (said.get("prompts") or {}).get("query") or None
    return Embedding(pooling, prompt, files_in(how), how.get("max_seq_length"))


def files_in(how: dict[str, Any]) -> tuple[str, ...]:
    """The kinds of files that a model takes, as its folder's file TRANSFORMER says."""
    return tuple(kind for kind in how.get("modality_config") or () if kind in KINDS)


def _check_modules(model: str, way: str) -> None:
    """Raise ConfigError for a model that makes vectors by more than there is here (EmbeddingGemma's `Dense`)."""
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
            f"The model {model} pools by {found}. There is {', '.join(THEIR_NAMES)}: choose by --pooling."
        )
    return known[found]


def pooling_of(model: str) -> str:
    """How a run begins to pool, where no option says so: as the files of sentence-transformers beside the model say, or
    by the last token of a model that writes, or else by the mean."""
    if model == TINY:
        return "last"
    found = said_by(model, POOLING)
    if found:
        _check_modules(model, "Such modules are not trained here: --pooling mean begins without them.")
        return _pooling(found, model)
    classes = said_by(model, "config.json").get("architectures") or []
    writing = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    return "last" if any(name.endswith(writing) for name in classes) else "mean"
