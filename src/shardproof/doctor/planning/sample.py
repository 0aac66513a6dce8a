"""A row with files, turned into tensors by the model's processor, as input for towers in a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.data.forms.parts import Problem, has_files
from shardproof.data.media.batches import together
from shardproof.errors import ConfigError
from shardproof.models.families.family import FED_BY

if TYPE_CHECKING:
    import numpy as np

    from shardproof.data.encoding.pack import PackedMediaRows
    from shardproof.data.media.encode import MediaEncoder
    from shardproof.data.media.rows import MediaRows
    from shardproof.data.rows import Row
    from shardproof.doctor.config import PlanConfig

FORMS = {  # the format of --files for each kind of file
    "image": "image=WIDTHxHEIGHT",
    "audio": "audio=SECONDS",
    "video": "video=WIDTHxHEIGHTxFRAMES",
}


@dataclass(frozen=True)
class Sample:
    """One row with files.

    Attributes:
        tensors: by name, as the media collator makes them from this row alone: `input_ids` of shape (1, tokens), the
            rest in the model's format; a list has an element for each row.
        axes: by name of a tensor, the dimension along which several rows are concatenated; other tensors are passed
            once.
        counts: the number of files of each kind.
        what: a description of the row.
    """

    tensors: Mapping[str, Any]
    axes: Mapping[str, int]
    counts: Mapping[str, int]
    what: str

    @property
    def tokens(self) -> int:
        return int(self.tensors["input_ids"].shape[1])

    @property
    def parts(self) -> set[str]:
        """The parts of a model that such a row passes through, besides the language model."""
        return {part for part, kinds in FED_BY.items() if any(self.counts[kind] for kind in kinds)}

    def batch(self, micro: int, length: int) -> dict[str, Any]:
        """`micro` such rows, each filled up with text to `length` tokens, without padding, and with all tokens learned.

        Raises:
            ConfigError: the row is longer.
        """
        import torch
        from torch.nn.functional import pad

        if self.tokens > length:
            raise ConfigError(
                f"--max-length {length}: a row with {self.what} has {self.tokens} tokens, so sft would leave it out. "
                f"Use --max-length {self.tokens} or more, or smaller files."
            )
        ids = self.tensors["input_ids"]
        text = int(ids[0, -1])
        fill = {"input_ids": text, "attention_mask": 1}
        row = {
            name: pad(value, (0, length - self.tokens), value=fill.get(name, 0))
            if getattr(value, "shape", None) == ids.shape
            else value
            for name, value in self.tensors.items()
        }
        lists = {name: value * micro for name, value in row.items() if isinstance(value, list)}
        batch = row | lists | {name: torch.cat([row[name]] * micro, axis) for name, axis in self.axes.items()}
        return batch | {"labels": batch["input_ids"]}


def described(config: PlanConfig) -> Sample | None:
    """The row that `--files` describes, or None.

    Raises:
        ConfigError: such a row cannot be made for this model.
    """
    if not config.files:
        return None
    from shardproof.data.media.encode import MediaEncoder
    from shardproof.data.rows import Row
    from shardproof.doctor.planning.subject import recipe_for, source_of
    from shardproof.train.model.loading import TINY, load_processing, tokenizer_of
    from shardproof.train.rows.media import check_options, media_limits

    files, recipe = files_in(config.files), recipe_for(config)
    if config.task != "causal_lm":
        raise ConfigError(f"--files: plans for --task {config.task} support text rows only.")
    check_options(recipe)
    if config.packing:
        raise ConfigError("--files and --packing: plans do not pack rows with files. Leave one of them out.")
    source = source_of(config)
    processing = None if source == TINY or Path(source).is_file() else load_processing(source, recipe)
    if processing is tokenizer_of(processing):
        raise ConfigError(
            f"--files {' '.join(config.files)}: {config.model} has no processor for files. Give the folder or hub id "
            "of a model that takes them, with its processor."
        )
    encoder = MediaEncoder(processing, media_limits(recipe, processing))
    lacking = [kind for kind in files if kind not in encoder.takes]
    if lacking:
        raise ConfigError(f"--files: {config.model} takes {', '.join(encoder.takes)}, but not {lacking[0]}.")
    parts = [{"type": kind, kind: kind} for kind, those in files.items() for _ in those]
    turns = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
    row = Row([*turns, {"role": "assistant", "content": "."}], "--files", 1)
    made = {kind: [_made(kind, size, encoder.limits.sampling_rate) for size in those] for kind, those in files.items()}
    try:
        encoder.check_heard([f"{seconds:g} s" for (seconds,) in files.get("audio", [])], made.get("audio", []))
    except Problem as problem:
        raise ConfigError(f"--files: {problem}") from None
    return _sample(encoder, row, made, " ".join(config.files))


class Joined:
    """Packed rows as if each were one conversation, with all its files. Its attributes are those of `MediaRows`.

    Rows without files are left out: the plan fills up with text anyway, and plain rows would become longer as turns of
    a template.
    """

    def __init__(self, packed: PackedMediaRows) -> None:
        self._packed = packed

    def __getitem__(self, index: int) -> dict[str, Any]:
        rows = [each["row"] for each in self._packed[index]["rows"]]
        seen = [row for row in rows if has_files(row.messages)]
        if len(seen) == 1:
            return {"row": seen[0]}
        turns = [turn for row in seen for turn in row.messages if turn["role"] != "system"]
        return {"row": replace((seen or rows)[0], messages=turns, kind="chat")}

    @property
    def rows(self) -> Iterator[Row]:
        return (self[index]["row"] for index in range(len(self._packed)))

    @property
    def encoded(self) -> Iterator[dict[str, Any]]:
        rows = self._packed.unpacked.encoded
        return ({"input_ids": [t for n in pack for t in rows[n]["input_ids"]]} for pack in self._packed.packs)


def heaviest(rows: MediaRows | Joined, encoder: Any) -> Sample | None:
    """The row whose files take the most tokens, or for embeddings the text; None if no row has files.

    Args:
        encoder: the encoder of the run's recipe.

    Raises:
        ConfigError: it cannot be read again.
    """
    import numpy as np

    from shardproof.data.encoding.embed import texts_of
    from shardproof.data.media.embed import MediaMatchEncoder

    matches = isinstance(encoder, MediaMatchEncoder)
    media: MediaEncoder = encoder.media if matches else encoder
    tokenizer = media.processor.tokenizer
    places = np.array([tokenizer.convert_tokens_to_ids(token) for token in media.tokens.values()])

    def conversations(row: Row) -> list[Row]:
        return encoder.conversations(row) if matches else [row]

    texts = [texts_of(one) if "lengths" in one else [one["input_ids"]] for one in rows.encoded]
    weights = [[int(np.isin(ids, places).sum()) for ids in each] for each in texts]
    if not any(
        map(any, weights)
    ):  # with some processors a file's mark is not a token: then the longest row with any files
        every = zip(texts, map(conversations, rows.rows), strict=True)
        weights = [[len(i) * has_files(row.messages) for i, row in zip(*both, strict=True)] for both in every]
    most = max(range(len(weights)), key=lambda number: max(weights[number]))
    if not any(weights[most]):
        return None
    row = conversations(rows[most]["row"])[int(np.argmax(weights[most]))]
    what = f"the files of {row.where}"
    try:
        files = media.files(row)
    except Problem as problem:
        raise ConfigError(f"{what}: {problem}") from None
    return _sample(media, row, files, what)


def longest(rows: Any) -> Sample | None:
    """The longest row with files among pairs or prompts, followed by its longer answer; None if no row has files.

    Raises:
        ConfigError: it cannot be read again.
    """
    if rows.heaviest is None:
        return None
    examples = rows.format["format_kwargs"]["transform"]
    row, encoder = examples.rows[rows.heaviest], examples.encoder
    what = f"the files of {row.where}"
    try:
        files = encoder.files(row)
    except Problem as problem:
        raise ConfigError(f"{what}: {problem}") from None
    turns = max(examples.example_of(row)[1], key=lambda turns: len(str(turns)))
    answer = [] if turns[-1]["role"] == "assistant" else [{"role": "assistant", "content": "."}]  # it will be generated
    return _sample(encoder, replace(row, messages=[*turns, *answer]), files, what)


def _sample(encoder: MediaEncoder, row: Row, files: dict[str, list[Any]], what: str) -> Sample:
    every = {kind: files.get(kind, []) for kind in FORMS}
    try:
        tensors = encoder.batch([row], [every])
    except Problem as problem:
        raise ConfigError(f"{what}: {problem}") from None
    return Sample(
        tensors, _axes(encoder, row, every, tensors), {kind: len(those) for kind, those in every.items()}, what
    )


def _axes(encoder: MediaEncoder, row: Row, files: dict[str, list[Any]], alone: Mapping[str, Any]) -> dict[str, int]:
    """The dimension in which two such rows are larger than one `alone`: most tensors are stacked; MiniCPM-V's patches
    are side by side."""
    try:
        both = encoder.batch([row] * 2, [files] * 2)
    except Problem:  # then a batch is made row by row
        both = together([alone] * 2, 0)
    sizes = {name: (value.shape, both[name].shape) for name, value in alone.items() if hasattr(value, "shape")}
    grown = {name: [a != b for a, b in zip(*shapes, strict=True)] for name, shapes in sizes.items()}
    return {name: dims.index(True) for name, dims in grown.items() if any(dims)}


def files_in(words: Sequence[str]) -> dict[str, list[list[float]]]:
    """The sizes of the files of each kind in the values of `--files`.

    Raises:
        ConfigError: a value has another format.
    """
    found: dict[str, list[list[float]]] = {}
    for word in words:
        kind, _, size = word.partition("=")
        try:
            numbers = [float(part) if kind == "audio" else int(part) for part in size.split("x")]
        except ValueError:
            numbers = []
        if kind not in FORMS or len(numbers) != 1 + FORMS[kind].count("x") or not all(0 < n < 1e6 for n in numbers):
            raise ConfigError(f"--files {word}: takes {', '.join(FORMS.values())}; one word for each file.")
        found.setdefault(kind, []).append(numbers)
    return found


def _made(kind: str, size: list[float], rate: int) -> Any:
    """A file of this size without content. Images are white, since some models take zeros for padding."""
    import numpy as np
    from PIL import Image

    from shardproof.data.media.reading import Frames

    if kind == "audio":
        silence: np.ndarray[Any, Any] = np.zeros(int(size[0] * rate), dtype=np.float32)
        return silence
    width, height, *frames = (int(n) for n in size)
    pictures = [Image.new("RGB", (width, height), "white") for _ in range(frames[0] if frames else 1)]
    return Frames(pictures, range(len(pictures)), 2.0) if frames else pictures[0]
