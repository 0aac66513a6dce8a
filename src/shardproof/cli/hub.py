"""Where models and datasets lie: in a folder, in a cache on this machine, or on the hub, asked once and shortly.

The libraries below ask the hub again and again, for a minute, before they say that it does not answer.
"""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from threading import Thread
from typing import TypeVar

from shardproof.cli.quiet import before_imports
from shardproof.data import hub
from shardproof.errors import ConfigError
from shardproof.train.config import RunConfig
from shardproof.train.models import is_local, lacks_weights

Config = TypeVar("Config", bound=RunConfig)

PATIENCE = 4.0  # seconds the hub has to answer
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def all_here(models: Iterable[str], datasets: Iterable[str] = ()) -> bool:
    """Whether what a command reads lies on this machine, so that nobody needs to be asked.

    Raises:
        ConfigError: a model is nowhere on this machine and the hub does not answer.
    """
    remote = [model for model in models if needs_network(model)]
    return not remote and not any(is_on_hub(name) for name in datasets)


def run_is_here(config: RunConfig) -> bool:
    """The same of a run."""
    return all_here(config.models, [*config.dataset, *config.val_dataset])


def is_on_hub(dataset: str) -> bool:
    """Whether the hub is asked for a dataset. Where nobody answers, or must be asked, a copy in the cache has to do.

    Raises:
        ConfigError: there is none.
    """
    name = dataset.partition("#")[0]
    of = hub.hub_name(name)
    if of is None:
        return False
    reason = "HF_HUB_OFFLINE forbids to ask it" if offline() else silence_of(endpoint())
    if reason is not None and not hub.is_cached(of):
        raise ConfigError(
            f"There is no file {name}, no copy of a dataset {of.owner}/{of.name} in the cache of this machine,\n"
            f"and the hub {endpoint()} cannot be reached ({reason}).\nName a file, or 'stdlib' for the embedded rows."
        )
    return reason is None


def offline() -> bool:
    """Whether the user forbids to ask the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def needs_network(model: str) -> bool:
    """Whether `model` is to come from the hub; a folder, or a complete copy in the cache, is used as it is.

    Raises:
        ConfigError: it is nowhere on this machine and the hub does not answer.
    """
    if is_local(model) or in_cache(model):
        return False
    looked = f"There is no folder {model}, no complete copy of it in the cache {cache()}"
    if offline():
        raise ConfigError(
            f"{looked},\nand HF_HUB_OFFLINE forbids to ask the hub. Name a folder, or unset HF_HUB_OFFLINE."
        )
    if reason := silence_of(endpoint()):
        raise ConfigError(
            f"{looked},\nand the hub {endpoint()} cannot be reached ({reason}).\n"
            "Name a folder with config.json and weights, or 'tiny', which needs no network."
        )
    return True


# Of a model, what transformers reads; not its weights in other formats.
READ = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py", "*.tiktoken")


def at_revision(config: Config) -> Config:
    """The options of a run whose model is the folder of the cache that holds its --model-revision, fetched if need be.

    Raises:
        ConfigError: the model is a folder, the hub has no such revision, or it is in no cache and nobody answers.
    """
    model, revision = config.model, config.model_revision
    if revision is None:
        return config
    if is_local(model):
        raise ConfigError(f"--model-revision {revision} is of a model of the hub, and --model {model} is none.")
    silent = "HF_HUB_OFFLINE forbids to ask it" if offline() else silence_of(endpoint())
    before_imports(False, config.verbose)
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            model,
            revision=revision,
            cache_dir=cache(),
            allow_patterns=list(READ),
            local_files_only=silent is not None,
        )
    except Exception as error:  # of the hub's client, of the network ...
        why = silent and f"it is not in the cache {cache()}, and the hub {endpoint()} cannot be reached ({silent})"
        reason = why or " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(f"--model {model} --model-revision {revision}: {reason}.") from None
    return config.model_copy(update={"model": folder, "model_revision": None})


def cache() -> Path:
    """That of models."""
    return hub.cache("HF_HUB_CACHE", "hub")


def in_cache(model: str) -> bool:
    """Whether the cache holds the model's config, tokenizer and all of its weights."""
    repository = cache() / ("models--" + model.replace("/", "--"))
    try:
        folder = repository / "snapshots" / (repository / "refs" / "main").read_text(encoding="utf-8").strip()
        indices = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.index.json")]
        parts = {part for index in indices[:1] for part in index["weight_map"].values()}
    except (OSError, ValueError, KeyError):
        return False
    complete = all((folder / part).is_file() for part in parts) and not lacks_weights(folder)
    return complete and (folder / "config.json").is_file() and any((folder / name).is_file() for name in TOKENIZERS)


def silence_of(url: str) -> str | None:
    """Why nothing answers at `url`, or None where something does, whatever it answers. Takes PATIENCE at most."""
    said: list[str | None] = [f"no answer in {PATIENCE:g} s"]

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=PATIENCE).close()
            said[0] = None
        except urllib.error.HTTPError:
            said[0] = None
        except (OSError, ValueError) as error:
            cause = getattr(error, "reason", error)
            # Somebody is there, with a certificate that the libraries may know by other means.
            said[0] = None if isinstance(cause, ssl.SSLError) else str(getattr(cause, "strerror", None) or cause)

    thread = Thread(target=ask, daemon=True)  # a timeout does not end the look-up of a name
    thread.start()
    thread.join(PATIENCE)
    return said[0]
