"""Parts that options name and that the model does not have."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from typing import TypeVar

from shardproof.errors import ConfigError
from shardproof.models.families.family import TALKER
from shardproof.train.options.config import RunConfig
from shardproof.train.resume import RUN, starts

log = logging.getLogger("shardproof")

Config = TypeVar("Config", bound=RunConfig)

LLM = "llm"  # all that a model of text has
TOWERS = ("vision", "audio", "aligner")  # which may be named together, for a model that has some of them
# Options of ms-swift, as they are noted among those that were given: of a model of text they say nothing there.
OF_SWIFT = {
    "freeze": ("freeze_llm", "freeze_vit", "freeze_aligner"),
    "part_learning_rates": ("vit_lr", "aligner_lr"),
}


def without_lacking(config: Config, here: Sequence[str]) -> Config:
    """The options without parts that the model lacks; `here` are those that it has.

    A part that is not there need not be frozen, which is told once. What ms-swift's options name of any model goes
    without a word, and what the run that goes on was recorded with stays as it is.

    Raises:
        ConfigError: --part-learning-rates names a part that the model does not have.
    """
    changed = {}
    for option, theirs in OF_SWIFT.items():
        named = getattr(config, option)
        lacking = [part for part in named if part not in here and not _in_company(part, named, here)]
        if option == "freeze" and "freeze_llm" in config.model_fields_set and list(here) == [LLM]:
            lacking = list(named)  # there it is a part of what sees or hears
        lacking = [part for part in lacking if part not in _recorded(config, option, lacking)]
        if not lacking:
            continue
        if config.model_fields_set.isdisjoint(theirs):
            hint = " It is there with --enable-audio-output." if TALKER in lacking else ""
            if option == "part_learning_rates":
                raise ConfigError(
                    f"--part-learning-rates {lacking[0]}=...: this model has no such part. It has {', '.join(here)}."
                    f"{hint} Leave {lacking[0]} out."
                )
            log.warning(
                "--freeze %s: this model has no %s to freeze. It has %s.%s",
                *(" ".join(named), ", ".join(lacking), ", ".join(here), hint),
            )
        left = [part for part in named if part not in lacking]
        changed[option] = {part: named[part] for part in left} if isinstance(named, dict) else left
    return config.model_copy(update=changed) if changed else config


def tolerant(config: Config) -> Config:
    """The same options, of which parts that the model lacks are left out: of a short run in place of one that goes on,
    and was recorded with them."""
    for theirs in OF_SWIFT.values():
        config.model_fields_set.update(theirs)
    return config


def _in_company(part: str, named: Iterable[str], here: Sequence[str]) -> bool:
    """`vision,audio,aligner` are the towers of a model, whichever it has."""
    return part in TOWERS and any(other in TOWERS and other in here for other in named)


def _recorded(config: RunConfig, option: str, lacking: Sequence[str]) -> Sequence[str]:
    """The parts that the checkpoint was written with which the run goes on from; of the first releases none are known,
    and any may be."""
    begin = starts(config) if lacking else []
    if not begin:
        return ()
    file = begin[0] / RUN
    options = json.loads(file.read_text(encoding="utf-8")).get("options") if file.is_file() else None
    return lacking if options is None else list(options.get(option) or ())
