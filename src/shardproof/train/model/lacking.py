"""Parts that options name but the model does not have."""

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

LLM = "llm"  # the only part of a text model
TOWERS = ("vision", "audio", "aligner")  # may be named together for a model that has some of them
# ms-swift options, by their names among the given options: they have no effect on a text model.
OF_SWIFT = {
    "freeze": ("freeze_llm", "freeze_vit", "freeze_aligner"),
    "part_learning_rates": ("vit_lr", "aligner_lr"),
}


def without_lacking(config: Config, here: Sequence[str]) -> Config:
    """The options without parts that the model lacks; `here` lists those that it has.

    Freezing a part that does not exist gives one warning. Parts named by ms-swift options are dropped silently, and
    options recorded by the run that is resumed stay as they are.

    Raises:
        ConfigError: --part-learning-rates names a part that the model does not have.
    """
    changed = {}
    for option, theirs in OF_SWIFT.items():
        named = getattr(config, option)
        lacking = [part for part in named if part not in here and not _in_company(part, named, here)]
        if option == "freeze" and "freeze_llm" in config.model_fields_set and list(here) == [LLM]:
            lacking = list(named)  # in such a model it belongs to the part that sees or hears
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
    """The same options, set so that parts the model lacks are dropped silently: for a short run that stands in for a
    resumed one, which was recorded with them."""
    for theirs in OF_SWIFT.values():
        config.model_fields_set.update(theirs)
    return config


def _in_company(part: str, named: Iterable[str], here: Sequence[str]) -> bool:
    """`vision,audio,aligner` together mean whichever towers the model has."""
    return part in TOWERS and any(other in TOWERS and other in here for other in named)


def _recorded(config: RunConfig, option: str, lacking: Sequence[str]) -> Sequence[str]:
    """The parts recorded in the checkpoint that the run resumes from; checkpoints of the first releases record none,
    and any part is accepted."""
    begin = starts(config) if lacking else []
    if not begin:
        return ()
    file = begin[0] / RUN
    options = json.loads(file.read_text(encoding="utf-8")).get("options") if file.is_file() else None
    return lacking if options is None else list(options.get(option) or ())
