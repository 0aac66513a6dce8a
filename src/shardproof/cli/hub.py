"""Where models and datasets are: in a folder, in a cache on this machine, or on the hub, which is asked just once.

The libraries below retry for a minute before they report that the hub does not answer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from shardproof.cli.quiet import before_imports
from shardproof.data.sources import hub, modelscope
from shardproof.errors import ConfigError
from shardproof.models.loading.whole_files import ADAPTER, check_whole_files
from shardproof.train.model.loading import is_local, lacks_weights
from shardproof.train.options.config import RunConfig

Config = TypeVar("Config", bound=RunConfig)
Options = TypeVar("Options", bound=BaseModel)

MODELS = ("model", "ref_model", "teacher_model", "value_model", "reward_model")  # options that name models

PATIENCE = 4.0  # seconds within which the hub has to answer
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "tekken.json")


def all_here(models: Iterable[str], datasets: Iterable[str] = ()) -> bool:
    """Whether everything that a command reads is on this machine, so that the hub need not be asked.

    Raises:
        ConfigError: a model is not on this machine and the hub does not answer.
    """
    remote = [model for model in models if needs_network(model)]
    return not remote and not any(is_on_hub(name) for name in datasets)


def run_is_here(config: RunConfig) -> bool:
    """Whether everything that a run reads is on this machine."""
    return all_here(config.models, [*config.dataset, *config.val_dataset, *getattr(config, "chord_sft_dataset", ())])


def is_on_hub(dataset: str) -> bool:
    """Whether the hub is to be asked for a dataset. If it does not answer, or must not be asked, a cached copy is used.

    Raises:
        ConfigError: there is none.
    """
    name = dataset.partition("#")[0]
    of = hub.hub_name(name)
    if of is None or of.modelscope:  # ModelScope's client handles this
        return False
    reason = "HF_HUB_OFFLINE forbids asking it" if offline() else silence_of(endpoint())
    if reason is not None and not hub.is_cached(of):
        raise ConfigError(
            f"There is no file {name}, no copy of the dataset {of.owner}/{of.name} in this machine's cache,\n"
            f"and the hub {endpoint()} cannot be reached ({reason}).\nName a file, or 'stdlib' for the embedded rows."
        )
    return reason is None


def offline() -> bool:
    """Whether the user forbids asking the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def needs_network(model: str, instead: str = ", or 'tiny', which needs no network") -> bool:
    """Whether `model` has to come from the hub; a folder, or a complete copy in the cache, is used directly. `instead`:
    an alternative for the error message.

    Raises:
        ConfigError: it is not on this machine and the hub does not answer.
    """
    if is_local(model) or in_cache(model):
        return False
    looked = f"There is no folder {model}, no complete copy of it in the cache {cache()}"
    if offline():
        raise ConfigError(
            f"{looked},\nand HF_HUB_OFFLINE forbids asking the hub. Name a folder, or unset HF_HUB_OFFLINE."
        )
    if reason := silence_of(endpoint()):
        raise ConfigError(
            f"{looked},\nand the hub {endpoint()} cannot be reached ({reason}).\n"
            f"Name a folder with config.json and weights{instead}."
        )
    return True


# The files of a model that transformers reads; not its weights in other formats.
READ = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py", "*.tiktoken")


def placed(config: Config) -> Config:
    """The options with ModelScope models, and one with a --model-revision, replaced by their downloaded folders.

    Raises:
        ConfigError: there is no such model or revision, or it is not cached and the hub does not answer.
    """
    return _at_revision(of_modelscope(config))


def of_modelscope(config: Options, weights: bool = True) -> Options:
    """The options with models named `MS::OWNER/NAME` replaced by their folders."""
    revision = getattr(config, "model_revision", None)
    found: dict[str, Any] = {}
    for option in MODELS:
        said = getattr(config, option, None)
        if isinstance(said, list):
            folders: Any = [_folder(model, None, weights) for model in said]
        else:
            folders = said and _folder(said, revision if option == "model" else None, weights)
        if folders != said:
            found[option] = folders
    if "model" in found and revision is not None:
        found["model_revision"] = None
    return config.model_copy(update=found) if found else config


def _folder(model: str, revision: str | None, weights: bool) -> str:
    name = modelscope.named(model)
    return model if name is None else str(modelscope.fetch("model", name, revision, weights))


def _at_revision(config: Config) -> Config:
    model, revision = config.model, config.model_revision
    if revision is None or not model:
        return config
    if is_local(model):
        raise ConfigError(f"--model-revision {revision} is for models from the hub, and --model {model} is not one.")
    silent = "HF_HUB_OFFLINE forbids asking it" if offline() else silence_of(endpoint())
    before_imports(False, config.verbose)
    try:
        folder = _fetched(model, revision, silent is None)
    except Exception as error:  # from the hub's client, the network ...
        why = silent and f"it is not in the cache {cache()}, and the hub {endpoint()} cannot be reached ({silent})"
        reason = why or " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(f"--model {model} --model-revision {revision}: {reason}.") from None
    return config.model_copy(update={"model": folder, "model_revision": None})


def _fetched(model: str, revision: str | None, asks: bool) -> str:
    """The folder of a model in the cache; `asks`: whether to fetch missing files from the hub."""
    from huggingface_hub import snapshot_download

    return snapshot_download(
        model, revision=revision, cache_dir=cache(), allow_patterns=list(READ), local_files_only=not asks
    )


def run_or_model(named: str) -> str:
    """The folder that a command is about: a local run or model, or a model fetched from a hub.

    Raises:
        ConfigError: it is named as a model on a hub, which has none of that name or does not answer.
    """
    if modelscope.named(named) is not None:
        return _folder(named, None, weights=True)
    of = hub.hub_name(named)
    if of is None or named != f"{of.owner}/{of.name}":
        return named
    asks = not _adapters_in_cache(named) and needs_network(named, instead="")
    before_imports(False, verbose=False)
    try:
        return _fetched(named, None, asks)
    except Exception as error:  # from the hub's client, the network ...
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(
            f"There is no folder {named}, and no such model could be fetched from the hub: {reason}"
        ) from None


def cache() -> Path:
    """The folder of the model cache."""
    return hub.cache("HF_HUB_CACHE", "hub")


def in_cache(model: str) -> bool:
    """Whether the cache holds the model's config, tokenizer and all of its weights."""
    try:
        folder = _newest_in_cache(model)
        indices = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.index.json")]
        parts = {part for index in indices[:1] for part in index["weight_map"].values()}
    except (OSError, ValueError, KeyError):
        return False
    complete = all((folder / part).is_file() for part in parts) and not lacks_weights(folder)
    return complete and (folder / "config.json").is_file() and any((folder / name).is_file() for name in TOKENIZERS)


def _adapters_in_cache(model: str) -> bool:
    """Whether the cache holds adapters of this name; their base model is looked up separately."""
    try:
        check_whole_files(folder := _newest_in_cache(model))
    except (OSError, ConfigError):
        return False
    return (folder / ADAPTER).is_file()


def _newest_in_cache(model: str) -> Path:
    """The most recently fetched folder of a model; raises OSError if there is none."""
    repository = cache() / ("models--" + model.replace("/", "--"))
    return repository / "snapshots" / (repository / "refs" / "main").read_text(encoding="utf-8").strip()


def silence_of(url: str) -> str | None:
    """Why nothing answers at `url`, or None if anything does, whatever the answer. Takes PATIENCE at most."""
    return hub.silence_of(url, PATIENCE)
