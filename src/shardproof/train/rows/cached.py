"""Rows encoded by `shardproof data encode`: appended to those that a run reads, if the run would encode them the same
way.

[Note: the same rows] A folder must agree with the run in the options below, which decide how a row is encoded, and in
the tokenizer or processor, including its chat template, compared by the files that it saves. The maximum length may
differ if that changes no row, or only drops rows.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from shardproof.data.cached import CachedRows, counted, opened, said_in
from shardproof.data.encoding.columns import with_weights
from shardproof.data.encoding.dated import day_of, writes_day
from shardproof.data.encoding.report import EncodeReport, nothing_left
from shardproof.data.media.limits import LIMITS
from shardproof.data.rows import Rows, drawn, parse_spec
from shardproof.errors import ConfigError, DataError
from shardproof.models.loading.processors import file_parts, write_processing
from shardproof.train.model.loading import tokenizer_of
from shardproof.train.options.config import RunConfig
from shardproof.train.options.option import flag

ANY_LENGTH = 2**31 - 1  # a maximum length that no row reaches
# Options that decide how a row is encoded, apart from the tokenizer and the maximum length.
ALIKE = ("task", "plain", "system", "rlhf_type", "tools", "environments")
PAIRED = ("dpo", "rm", "orpo", "cpo", "simpo")  # algorithms that encode rows alike
OF_MACHINE = ("is_local", "local_files_only", "name_or_path")  # what a tokenizer saves about where it came from
TEMPLATE = "chat template"
_kept: ContextVar[bool] = ContextVar("_kept", default=False)


@contextmanager
def to_be_kept() -> Iterator[None]:
    """Within this context, encoded rows carry a description of how they were encoded, for a folder."""
    before = _kept.set(True)
    try:
        yield
    finally:
        _kept.reset(before)


def with_cached(config: RunConfig, rows: Any, specs: Sequence[str]) -> Any:
    """The rows, followed by those of these folders.

    Raises:
        ConfigError: a folder does not hold encoded rows, or its rows were encoded for something else.
    """
    if not specs:
        return rows
    sources, limits = opened(specs)
    for source in sources:
        _check_options(source, options_of(config))
    every = [array("q", range(len(source))) for source in sources]
    chosen = [
        all_ if many is None else drawn(all_, many, config.seed) for all_, many in zip(every, limits, strict=True)
    ]
    return rows.and_of(sources, chosen, [row for source in sources for row in source.skipped])


def check_folders(config: RunConfig) -> None:
    """Raise ConfigError for a folder that does not hold encoded rows, on any of the machines that map it."""
    for spec in (*config.cached_dataset, *config.cached_val_dataset):
        _check_command(parse_spec(spec)[0], said_in(parse_spec(spec)[0]), config.command)


def day_of_rows(rows: Any) -> date | None:
    """The day recorded with rows that were encoded before; None if there are none."""
    days = (
        (source.said["day"] for source, _ in rows.by_source() if isinstance(source, CachedRows)) if _any(rows) else ()
    )
    return next(map(date.fromisoformat, days), None)


def _any(rows: Any) -> bool:
    return isinstance(rows, Rows) and rows.ready


def options_of(config: RunConfig) -> dict[str, Any]:
    """The options that a folder and a run must have in common."""
    named = {name: getattr(config, name) for name in ALIKE if name in type(config).model_fields}
    if named.get("rlhf_type") in PAIRED:
        named["rlhf_type"] = "/".join(PAIRED)
    return {"command": config.command, **json.loads(json.dumps(named))}


def said_of(config: RunConfig, processing: Any, **more: Any) -> dict[str, Any]:
    """The description of how rows were encoded, for a folder; `more`: what the recipe adds, by option name."""
    if tokenizer_of(processing) is not processing:
        more |= {name: getattr(config, name) for name in (*LIMITS, "enable_audio_output")}
    return {
        "options": options_of(config),
        "more": json.loads(json.dumps(more)),
        "processing": _processing(processing),
        "length": [config.max_length, config.truncation],
    }


def encoded_once(
    config: RunConfig,
    rows: Any,
    processing: Any,
    encode: Callable[[Any], Any],
    kind: Callable[..., Any] = EncodeReport,
    **more: Any,
) -> Any:
    """The encoded rows: those from folders as they are, the others encoded by `encode`. See [Note: the same rows].

    Args:
        encode: returns a dataset with `report`, `places` and `numbers`.
        kind: the class of its `report`.
        more: what else decides how rows are encoded, besides the options above.

    Returns: a dataset with these attributes and, inside `to_be_kept`, `said`: how the rows were encoded, for a folder.

    Raises:
        ConfigError: rows were encoded differently. DataError: no row is left.
    """
    if not (_any(rows) or _kept.get()):
        return encode(rows)
    said = said_of(config, processing, **more)
    if not _any(rows):
        encoded = encode(rows)
        encoded.said = said
        return encoded
    groups = rows.by_source()
    fresh = [number for source, pairs in groups if not isinstance(source, CachedRows) for number, _ in pairs]
    parts = []
    if fresh:
        some = rows.take(fresh)
        part = encode(some)
        rows.skipped[:] = some.skipped
        _renumber(part, fresh)
        parts.append(part)
    for source, pairs in groups:
        if isinstance(source, CachedRows):
            parts.append(_part(config, source, [record for _, record in pairs], kind, said, processing))
            _renumber(parts[-1], [number for number, _ in pairs])
    encoded = _together([part for part in parts if len(part)] or parts[:1])
    if not len(encoded):
        raise DataError(nothing_left(encoded.report, config.max_length) if kind is EncodeReport else "No row is left.")
    encoded.said = said
    return encoded


def _renumber(part: Any, numbers: Sequence[int]) -> None:
    """Map the row numbers of a part to those among all rows."""
    part.numbers = array("q", map(numbers.__getitem__, part.numbers))
    part.cut = array("q", map(numbers.__getitem__, getattr(part, "cut", ())))


def _together(parts: Sequence[Any]) -> Any:
    import datasets

    first, *others = parts
    if not others:
        return first
    try:
        whole = datasets.concatenate_datasets(_with_like_numbers(with_weights(parts)))
    except (ValueError, TypeError) as error:
        raise DataError(f"The rows of folders and files cannot be put together: {error}") from error
    whole.report, whole.places = first.report, first.places
    whole.numbers, whole.cut = array("q", first.numbers), array("q", first.cut)
    for part in others:
        whole.report = whole.report.plus(part.report)
        whole.places.extend(part.places)
        whole.numbers.extend(part.numbers)
        whole.cut.extend(part.cut)
    return whole


def _with_like_numbers(parts: Sequence[Any]) -> list[Any]:
    """The parts, with integers cast to floats in columns where another part has floats, as they would be in one
    table."""
    import datasets

    whole, real = datasets.Value("int64"), datasets.Value("float64")
    mixed = {name for part in parts for name, kind in part.features.items() if kind == real}
    found = []
    for part in parts:
        for name in [name for name in part.features if name in mixed and part.features[name] == whole]:
            part = part.cast_column(name, real)
        found.append(part)
    return found


def _part(
    config: RunConfig,
    source: CachedRows,
    wanted: Sequence[int],
    kind: Callable[..., Any],
    said: dict[str, Any],
    processing: Any,
) -> Any:
    """The encoded form of the wanted rows of a folder, with a report on them."""
    _check_options(source, said["options"])
    _check_more(source, said["more"])
    _check_processing(config, source, said["processing"], processing)
    report = kind(**source.said["report"])
    longest = _longest(config, source, report, kind is EncodeReport)
    found, whole = source.encoded(wanted, longest)
    if not whole and isinstance(report, EncodeReport) and kind is not EncodeReport:
        raise ConfigError(
            f"{source.name}: encoded rows of --task {source.said['options'].get('task')} can only be used in full."
            f" Leave --val-split and #N out, and hold rows out when encoding them: 'shardproof data encode"
            " --val-split'."
        )
    found.report = report if whole else _of_part(report, found, len(wanted))
    return found


def _of_part(report: Any, found: Any, wanted: int) -> Any:
    """The report on a selection of a folder's rows."""
    if not isinstance(report, EncodeReport):
        return replace(report, rows=wanted, kept=len(found))
    pieces = Counter(found.numbers)
    several = [many for many in pieces.values() if many > 1]
    tokens, learnt = counted(found)
    return replace(
        report,
        rows=wanted,
        kept=len(pieces),
        dropped=wanted - len(pieces),
        unlearnable=0,
        truncated=len(found.cut),
        split=len(several),
        pieces=sum(several),
        tokens=tokens,
        learnt_tokens=learnt,
    )


def _longest(config: RunConfig, source: CachedRows, report: Any, tokens: bool) -> int | None:
    """The maximum number of tokens for rows to take; None takes all rows of the folder.

    Raises:
        ConfigError: rows would have been encoded differently.
    """
    most, cut = source.said["length"]
    if [most, cut] == [config.max_length, config.truncation] or report.longest <= min(most, config.max_length):
        return None
    if (
        tokens
        and config.truncation == "drop"
        and (report.longest <= most or (cut == "drop" and config.max_length <= most))
    ):
        return config.max_length
    there = "without --max-length" if most == ANY_LENGTH else f"with --max-length {most} --truncation {cut}"
    raise ConfigError(
        f"{source.name} was encoded {there}, and its longest row has {report.longest:,} tokens; this run has"
        f" --max-length {config.max_length} --truncation {config.truncation}, which gives different rows.\nEncode the"
        f" rows again with these two options, or train with those of the folder."
    )


def _check_options(source: CachedRows, here: dict[str, Any]) -> None:
    _check_command(source.name, source.said, here["command"])
    _check_alike(source, source.said["options"], here)


def _check_command(name: str, said: dict[str, Any], command: str) -> None:
    if (there := said["options"]["command"]) != command:
        raise ConfigError(
            f"{name} was encoded for 'shardproof {there}', but this is '{command}'.\nEncode its rows again:"
            f" 'shardproof data encode {command} ...'."
        )


def _check_more(source: CachedRows, here: dict[str, Any]) -> None:
    _check_alike(source, source.said["more"], here)


def _check_alike(source: CachedRows, there: dict[str, Any], here: dict[str, Any]) -> None:
    odd = [name for name in dict.fromkeys((*there, *here)) if there.get(name) != here.get(name)]
    if odd:
        told = [f"{flag(name)} {_shown(there.get(name))}, but this run has {_shown(here.get(name))}" for name in odd]
        raise ConfigError(
            f"{source.name} was encoded with {'; '.join(told)}.\nEncode its rows again with the options of this run, or"
            " train with those of the folder."
        )


def _shown(value: Any) -> str:
    return "none" if value in (None, [], {}) else " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _check_processing(config: RunConfig, source: CachedRows, here: dict[str, str], processing: Any) -> None:
    there, tokenizer = source.said["processing"], tokenizer_of(processing)
    odd = [name for name in dict.fromkeys((*there, *here)) if there.get(name) != here.get(name)]
    if odd:
        raise ConfigError(
            f"{source.name} was encoded with a {odd[0]} other than that of this run (--model {config.model}).\nEncode"
            " its rows again with this model and these options, or train the model that it was encoded for."
        )
    if writes_day(getattr(tokenizer, "chat_template", None)) and source.said["day"] != str(day_of(tokenizer)):
        raise ConfigError(
            f"{source.name}: the chat template writes the date, which was {source.said['day']} when its rows were"
            f" encoded, but is {day_of(tokenizer)} in other rows of this run. Encode all rows on the same day."
        )


def _processing(processing: Any) -> dict[str, str]:
    """Checksums of the files of a tokenizer or processor, by names that users know."""
    sums: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="shardproof-") as scratch:
        write_processing(processing, scratch)
        for file in sorted(file for file in Path(scratch).rglob("*") if file.is_file()):
            template = "template" in file.name
            name = TEMPLATE if template else "processor" if "processor" in file.name else "tokenizer"
            sums.setdefault(name, hashlib.sha256()).update(file.name.encode() + _content(file))
    if parts := file_parts(processing):
        sums.setdefault("processor", hashlib.sha256()).update(json.dumps(parts).encode())
    return {name: value.hexdigest()[:24] for name, value in sums.items()}


def _content(file: Path) -> bytes:
    if file.name != "tokenizer_config.json":
        return file.read_bytes()
    said = json.loads(file.read_text(encoding="utf-8"))
    return json.dumps({name: said[name] for name in sorted(said) if name not in OF_MACHINE}).encode()
