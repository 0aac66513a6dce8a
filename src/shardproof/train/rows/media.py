"""The options for images, audio and video, in the form that the data package takes; and what a talker is to learn."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardproof.data.forms.parts import KINDS
from shardproof.data.media.limits import EITHER, LIMITS, SAMPLING_RATE, Limits
from shardproof.data.rows import BadRow, Rows, describe_bad
from shardproof.errors import ConfigError, DataError
from shardproof.models.families.family import TALKER
from shardproof.models.families.known import family_of
from shardproof.models.loading.processors import file_parts, processor_class, said_by, square_of_token
from shardproof.train.model.loading import TINY, load_model, tokenizer_of
from shardproof.train.options.config import RunConfig, SftConfig
from shardproof.train.options.option import flag
from shardproof.train.resume import PARTS, said_by_run

log = logging.getLogger("shardproof")

OF_FILES = (*LIMITS, "lost_files", "media_root", "allow_remote_media", "remote_media_cache", "row_cache")


def check_media_root(config: RunConfig) -> None:
    """Raise ConfigError for a --media-root that cannot hold files: every row would be reported as bad."""
    root = Path(config.media_root).expanduser() if config.media_root is not None else None
    if root is not None and not root.is_dir():
        what = "is a file" if root.exists() else f"does not exist{_nearest(root)}"
        raise ConfigError(
            f"--media-root {config.media_root} {what}.\nName the folder that holds the images, audio and video files."
        )


def _nearest(folder: Path) -> str:
    """The part of a path that exists."""
    there = next((parent for parent in folder.absolute().parents if parent.is_dir()), None)
    return f": there is {there}" if there is not None and there != Path("/") else ""


def tell_other_parts(start: Path, processor: Any) -> None:
    """Log the messages of `other_parts`."""
    for told in other_parts(start, processor):
        log.warning("%s", told)


def other_parts(start: Path, processor: Any) -> list[str]:
    """A message if the run that wrote a checkpoint prepared files with other classes of the processor. transformers has
    one of each kind with torchvision, and one without."""
    saved, here = said_by_run(start).get(PARTS) or {}, file_parts(processor)
    odd = [f"{part} instead of {saved[name]}" for name, part in here.items() if saved.get(name, part) != part]
    return odd and [
        f"Files are prepared by other classes than when {start} was written: {', '.join(odd)}. The model's inputs from"
        " the same file differ slightly from here on. Which of them transformers uses depends on whether torchvision"
        " is installed."
    ]


def media_limits(config: RunConfig, processor: Any) -> Limits:
    """The limits on what may be read, and the sampling rate that the model expects for audio."""
    hears = getattr(processor, "feature_extractor", None)
    for pixels, tokens in EITHER:
        if None not in (getattr(config, pixels), getattr(config, tokens)):
            raise ConfigError(f"{flag(pixels)} and {flag(tokens)} set the same bound. Give one of them.")
    bound = min((n for n in (config.max_image_tokens, config.max_frame_tokens) if n is not None), default=None)
    side, fewest = (1, 1) if bound is None else _square_of_token(config, processor, bound)
    return Limits(
        root=Path(config.media_root).expanduser() if config.media_root else None,
        max_pixels=config.max_pixels,
        max_seconds=config.max_seconds,
        max_frame_pixels=config.max_frame_pixels,
        max_image_tokens=config.max_image_tokens,
        max_frame_tokens=config.max_frame_tokens,
        token_side=side,
        fewest_tokens=fewest,
        max_frames=config.max_frames,
        fps=config.fps,
        remote=config.allow_remote_media,
        remote_cache=Path(config.remote_media_cache).expanduser() if config.remote_media_cache else None,
        sampling_rate=getattr(hears, "sampling_rate", SAMPLING_RATE),
    )


def _square_of_token(config: RunConfig, processor: Any, bound: int) -> tuple[int, int]:
    """The side in pixels of the square that becomes one token, and the least number of tokens per image.

    Raises:
        ConfigError: its processor does not say, or makes more tokens from any image than the lowest `bound`.
    """
    if processor is tokenizer_of(processor):
        return 1, 1  # it takes no files, which is reported elsewhere
    given = next(tokens for _, tokens in EITHER if getattr(config, tokens) is not None)
    said = square_of_token(processor)
    if said is None:
        raise ConfigError(
            f"{flag(given)}: the processor of {config.model} does not say how many pixels a token has. Use"
            f" --max-pixels and --max-frame-pixels."
        )
    if bound < 2 * said[1]:  # it scales the smallest images up, and then rounds up
        raise ConfigError(
            f"{flag(given)} {bound}: the processor of {config.model} makes up to {2 * said[1]} tokens from the"
            f" smallest image."
        )
    return said


def takes_files(model: str) -> bool:
    """Whether the model in a folder or on the hub takes files."""
    return model != TINY and processor_class(model) is not None


def check_backbone(config: RunConfig, kind: str, source: str | None = None) -> None:
    """Raise ConfigError for a model (by default --model) that takes files but cannot return hidden states, before the
    files are read, which may take long."""
    source = source or config.model
    if takes_files(source):
        load_model(source, config, kind, to_shard=True)


def check_templated(plain: bool, model: str) -> None:
    """Raise ConfigError for --plain with a model that takes files."""
    if plain:
        raise ConfigError(
            f"--plain: the model {model} takes files, and its chat template says where they go. Leave it out."
        )


def files_taken(processing: Any) -> tuple[str, ...]:
    """The kinds of files that a processor takes; a tokenizer takes none."""
    if tokenizer_of(processing) is processing:
        return ()
    return tuple(kind for kind in KINDS if getattr(processing, f"{kind}_token", None) is not None)


def warn_of_limits(config: RunConfig, processing: Any) -> None:
    """Warn about options for files if the model takes none. A plugin's model may take files without a processor."""
    if config.external_plugins or tokenizer_of(processing) is not processing:
        return
    defaults = type(config).model_fields
    there = [name for name in OF_FILES if name in defaults]  # one of them exists only in sft
    given = [flag(name) for name in there if getattr(config, name) != defaults[name].default]
    if given:
        log.warning("%s: no effect, as %s takes no images, audio or video.", ", ".join(given), config.model)


def check_options(config: SftConfig, streams: bool = False) -> None:
    """Raise ConfigError for options that are not supported for models that take files; `streams`: whether rows are read
    during training."""
    asked_for = (
        (streams, "streaming"),
        (config.truncation == "split", "truncation split"),
        (config.stochastic_rounding, "stochastic-rounding"),
        (config.fp8, "fp8"),
    )
    for asked, name in asked_for:
        if asked:
            raise ConfigError(f"--{name} is for text models, but {config.model} has a media processor.")


def check_spoken(config: SftConfig, rows: Rows) -> None:
    """Raise ConfigError if a talker is to be trained, but no training row has speech codes."""
    if TALKER not in (config.train_parts or ()) or config.streaming:
        return
    family = family_of(_declared(config.model))
    if (family is None or family.codes) and not any(row.extra.get("codes") for row in rows):
        raise ConfigError(
            "--train-parts talker needs rows with 'codes', the codes of the spoken answer, but none has them."
        )


def check_codes(model: str, rows: Rows) -> None:
    """Check that speech codes are in the form that this model's talker learns from, and belong to an answer that is
    trained on.

    Raises:
        DataError: some are not.
    """
    config = _declared(model)
    family, talker = family_of(config), config.get("talker_config") or {}
    if family is None:
        return
    groups = talker.get("num_code_groups") if family.codes == "groups" else None
    known, bad = _known(talker, groups), []
    for row in rows:
        codes = row.extra.get("codes")
        why = _wrong(codes, groups, known) if codes else None
        if codes and not why and not row.messages[-1].get("loss", True):
            why = "'codes' belong to the last answer, which is not trained on: leave them out, or train on that answer"
        if why:
            bad.append(BadRow(row.source, row.line, why))
    if bad:
        raise DataError(describe_bad(bad, len(rows), None))


def _declared(model: str) -> dict[str, Any]:
    """The config.json of a model folder; empty if there is none."""
    return said_by(model, "config.json") if Path(model).expanduser().is_dir() else {}


def _known(talker: Mapping[str, Any], groups: int | None) -> list[int | None]:
    """How many codes a talker knows, from its config: one number, or one for each code of a group. None if it does not
    say."""
    if groups is None:
        return [talker.get("vocab_size")]
    first, rest = ((talker.get(part) or {}).get("vocab_size") for part in ("text_config", "code_predictor_config"))
    return [first, *[rest] * (groups - 1)]


def _wrong(codes: Sequence[Any], groups: int | None, known: Sequence[int | None]) -> str | None:
    """Why a talker that knows `known` codes cannot learn these; None if it can."""
    found = len(codes[0]) if isinstance(codes[0], list) else None
    if found != groups:
        return f"'codes' holds {_codes(found)}, but the talker expects {_codes(groups)}"
    for group in codes:
        for code, size in zip(group if groups else [group], known, strict=True):
            if size is not None and code >= size:
                return f"'codes' holds {code}, but the talker knows codes from 0 to {size - 1}"
    return None


def _codes(group: int | None) -> str:
    return "one code after the other" if group is None else f"groups of {group} codes"
