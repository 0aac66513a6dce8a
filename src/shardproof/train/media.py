"""The options about pictures, sounds and videos, as the data room takes them; and what a talker is to learn."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from shardproof.data.limits import LIMITS, SAMPLING_RATE, Limits
from shardproof.data.parts import KINDS
from shardproof.data.rows import BadRow, Rows, describe_bad
from shardproof.errors import ConfigError, DataError
from shardproof.models.families import family_of
from shardproof.models.processors import processor_class
from shardproof.train.config import RunConfig, SftConfig
from shardproof.train.models import TINY, load_model, tokenizer_of
from shardproof.train.option import flag

log = logging.getLogger("shardproof")

OF_FILES = (*LIMITS, "lost_files", "media_root", "allow_remote_media", "remote_media_cache")


def check_media_root(config: RunConfig) -> None:
    """Raise ConfigError for a --media-root in which no file can lie: every row would be told to be bad."""
    root = Path(config.media_root).expanduser() if config.media_root is not None else None
    if root is not None and not root.is_dir():
        what = "is a file" if root.exists() else f"does not exist{_nearest(root)}"
        raise ConfigError(
            f"--media-root {config.media_root} {what}.\nName the folder that pictures, sounds and videos lie in."
        )


def _nearest(folder: Path) -> str:
    """The part of a path that is there."""
    there = next((parent for parent in folder.absolute().parents if parent.is_dir()), None)
    return f": there is {there}" if there is not None and there != Path("/") else ""


def media_limits(config: RunConfig, processor: Any) -> Limits:
    """What may be read, and the sampling rate that the model wants sounds at."""
    hears = getattr(processor, "feature_extractor", None)
    return Limits(
        root=Path(config.media_root).expanduser() if config.media_root else None,
        max_pixels=config.max_pixels,
        max_seconds=config.max_seconds,
        max_frame_pixels=config.max_frame_pixels,
        max_frames=config.max_frames,
        fps=config.fps,
        remote=config.allow_remote_media,
        remote_cache=Path(config.remote_media_cache).expanduser() if config.remote_media_cache else None,
        sampling_rate=getattr(hears, "sampling_rate", SAMPLING_RATE),
    )


def takes_files(model: str) -> bool:
    """Whether the model in a folder or on the hub does."""
    return model != TINY and processor_class(model) is not None


def check_backbone(config: RunConfig, kind: str, source: str | None = None) -> None:
    """Raise ConfigError for a model (by default --model) that takes files and cannot be asked for hidden states: before
    its files are read, which may take long."""
    source = source or config.model
    if takes_files(source):
        load_model(source, config, kind, to_shard=True)


def check_templated(plain: bool, model: str) -> None:
    """Raise ConfigError for --plain with a model that takes files."""
    if plain:
        raise ConfigError(
            f"--plain: the model {model} takes files, and its chat template says where they stand. Leave it out."
        )


def files_taken(processing: Any) -> tuple[str, ...]:
    """The kinds of files that a processor takes; a tokenizer takes none."""
    if tokenizer_of(processing) is processing:
        return ()
    return tuple(kind for kind in KINDS if getattr(processing, f"{kind}_token", None) is not None)


def warn_of_limits(config: RunConfig, processing: Any) -> None:
    """Say which options are about files, where the model takes none. A plugin's may take some without a processor."""
    if config.external_plugins or tokenizer_of(processing) is not processing:
        return
    defaults = type(config).model_fields
    given = [flag(name) for name in OF_FILES if getattr(config, name) != defaults[name].default]
    if given:
        log.warning("%s without effect: %s takes no pictures, sounds or videos.", ", ".join(given), config.model)


def check_options(config: SftConfig, streams: bool = False) -> None:
    """Raise ConfigError for an option that models which take files do not have; `streams`: whether rows are read while
    training."""
    asked_for = (
        (streams, "streaming"),
        (config.truncation == "split", "truncation split"),
        (config.stochastic_rounding, "stochastic-rounding"),
        (config.fp8, "fp8"),
    )
    for asked, name in asked_for:
        if asked:
            raise ConfigError(f"--{name} is for models of text, and {config.model} comes with a processor of media.")


def check_codes(model: str, rows: Rows) -> None:
    """See that rows have codes of speech, in the form that the talker of this model learns from.

    Raises:
        ConfigError: no row has any. DataError: some are of another form.
    """
    file = Path(model).expanduser() / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    family = family_of(config)
    groups = (config.get("talker_config") or {}).get("num_code_groups") if family and family.codes == "groups" else None
    spoken, bad = 0, []
    for row in rows:
        codes = row.extra.get("codes")
        if codes:
            spoken += 1
            found = len(codes[0]) if isinstance(codes[0], list) else None
            if family is not None and found != groups:
                bad.append(
                    BadRow(row.source, row.line, f"'codes' holds {_codes(found)}, the talker says {_codes(groups)}")
                )
    if not spoken:
        raise ConfigError("--train-parts talker learns from rows with 'codes', those of the spoken answer: none has.")
    if bad:
        raise DataError(describe_bad(bad, len(rows), None))


def _codes(group: int | None) -> str:
    return "one code after the other" if group is None else f"groups of {group} codes"
