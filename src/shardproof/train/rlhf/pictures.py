"""Pairs and prompts with files, in the format of TRL's trainers: checked before training, read when a batch is made.

TRL needs a column of images, and messages in which `{"type": "image"}` marks the position of each; the model's
processor does the rest. It does not support audio or video, so rows with answers have all files in a separate column,
which our own collator passes to the processor. The dataset only stores row numbers; a transform makes the examples.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from shardproof.data.encoding.beside import as_many_as_help, in_order
from shardproof.data.forms.parts import KINDS, Problem, has_files, parts_of
from shardproof.data.media.batches import OnLost
from shardproof.data.media.encode import MediaEncoder
from shardproof.data.rows import BadRow, Places, Row, Rows, pass_over
from shardproof.errors import DataError
from shardproof.train.model.loading import tokenizer_of
from shardproof.train.rlhf.reward_calls import TAKEN
from shardproof.train.rows.media import media_limits

if TYPE_CHECKING:
    from shardproof.train.options.rlhf_config import RlhfConfig

log = logging.getLogger("shardproof")

NUMBER = "number of the row"  # the column of a dataset with files
OTHER = "number of the row with another answer"  # kto's, which compares with answers to other questions
FILES = "files of the row"  # by kind
ANSWERED = ("dpo", "kto", "orpo", "simpo", "cpo", "rm", "gkd")  # the algorithms that take files beside answers

# From a row to TRL's example, and the conversations in it.
ExampleOf = Callable[..., tuple[dict[str, Any], list[list[dict[str, Any]]]]]


@dataclass(frozen=True)
class Files:
    """The files of the row at `where`, `by_kind`. This is a class because accelerate searches dicts and lists in
    batches for tensors and rebuilds them, which would break videos."""

    by_kind: dict[str, list[Any]]
    where: str


@dataclass(frozen=True)
class Examples:
    """The transform of a dataset with files: from row numbers to examples with their files.

    Attributes:
        numbers: the numbers of all rows of the dataset, in order.
        on_lost: what happens to a row whose file could be read before training but cannot be read now. `skip`: the next
            readable row takes its place, since TRL needs the number of rows that it asked for; `stop` raises.
        columns: the columns for rewards in any row: a reward needs its column even if no row of a batch has it.
    """

    rows: Rows
    example_of: ExampleOf
    encoder: MediaEncoder
    numbers: Sequence[int]
    on_lost: OnLost
    columns: Sequence[str] = ()

    def __call__(self, batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        others = batch.get(OTHER, [])
        made = {number: self.example(number) for number in (*batch[NUMBER], *others)}
        examples = [made[number] for number in batch[NUMBER]]
        if others:
            answers = (made[number]["completion"] for number in others)
            examples = [{**example, OTHER: answer} for example, answer in zip(examples, answers, strict=True)]
        names = dict.fromkeys([*self.columns, *(name for example in examples for name in example)])
        return {name: [example.get(name) for example in examples] for name in names}

    def example(self, number: int) -> dict[str, Any]:
        """Raises DataError for a lost file if that stops the run, or if no row can be read any more."""
        first = bisect_left(self.numbers, number)
        for i in range(len(self.numbers)):
            row_number = self.numbers[(first + i) % len(self.numbers)]
            row = self.rows[row_number]
            try:
                return {**self._example(row, self.encoder.files(row)), NUMBER: row_number}
            except Problem as problem:
                if self.on_lost == "stop":
                    raise DataError(f"{row.where}: {problem}") from problem
                log.warning("%s is left out of its step, and another row takes its place: %s", row.where, problem)
        raise DataError("No row can be read any more: all of their files are missing.")

    def _example(self, row: Row, files: dict[str, list[Any]]) -> dict[str, Any]:
        example, _ = self.example_of(row)
        turns = ("messages", "prompt", "chosen", "rejected", "completion")
        marked = {name: self._marked(example[name], files) for name in turns if name in example}
        judged = len(marked) > 1  # for others, TRL would make batches itself
        pictures = {"images": files["image"]} if judged else {}
        return {**example, **marked, **pictures, FILES: Files(files, row.where)}

    def _marked(self, turns: list[dict[str, Any]], files: dict[str, list[Any]]) -> list[dict[str, Any]]:
        return [in_parts(turn) for turn in self.encoder.shown(turns, files)]


def in_parts(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn whose content is a list in which files are only placeholders."""
    content = turn["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return {**turn, "content": [part if part["type"] == "text" else {"type": part["type"]} for part in parts]}


def first_with_files(*some: Rows | None) -> str:
    """The location of the first row that names a file, or an empty string."""
    return next((row.where for rows in some for row in rows or () if has_files(row.messages)), "")


def are_pictured(dataset: Any) -> bool:
    return NUMBER in dataset.column_names


def marks_of(processing: Any, model: Any) -> list[int]:
    """The tokens that stand for files or begin them. Answers must not contain them, as there would be no file."""
    kinds = (*KINDS, "vision")
    tokens = [getattr(processing, f"{kind}{what}", None) for kind in kinds for what in ("_token", "_bos_token")]
    known = [tokenizer_of(processing).convert_tokens_to_ids(token) for token in tokens if token is not None]
    # A config knows some that the processor does not: Gemma 3's, and the token that begins an image in Qwen-VL.
    of_config = [f"{kind}{what}_token_id" for kind in kinds for what in ("", "_bos", "_start")]
    said = [getattr(model.config, name, None) for name in (*of_config, "boi_token_id", "boa_token_id")]
    return sorted({*known, *(number for number in said if number is not None)})


def with_others(dataset: Any, together: int) -> Any:
    """Rows with files in their order, each with the answer of the row before it in its group of `together` rows."""
    numbers = dataset.with_format(None)[NUMBER][:]
    groups = [numbers[i : i + together] for i in range(0, len(numbers), together)]
    others = [number for group in groups for number in (*group[-1:], *group[:-1])]
    made = dataset.from_dict({NUMBER: numbers, OTHER: others})
    made.set_transform(dataset.format["format_kwargs"]["transform"])
    return made


def encode_pictured(
    config: RlhfConfig, rows: Rows, processing: Any, example_of: ExampleOf, prompts: bool, report: Any
) -> Any:
    """A dataset of the rows that are usable and not too long.

    Args:
        processing: the processor of the model.
        example_of: from a row to TRL's example and its conversations, of which the longest counts.
        prompts: whether rows are prompts, to be answered.
        report: counts the rows.

    Raises:
        DataError: a file cannot be used, a row is too long and must not be, or no row is left.
    """
    import datasets

    encoder = MediaEncoder(processing, media_limits(config, processing), system=config.system)
    example_of = partial(example_of, seen=encoder.seen)
    lost = set(encoder.takes) - {"image"} if config.use_vllm else set()
    bad, kept, places = [], [], Places()
    most, heaviest = 0, 0

    def length_of(number: int) -> tuple[Row, int | str]:
        row = rows[number]
        place = Row([], row.source, row.line)
        try:
            return place, _length(row, encoder, lost, example_of, prompts)
        except Problem as problem:
            return place, str(problem)

    for number, (row, length) in enumerate(in_order(length_of, len(rows), as_many_as_help(config.workers))):
        if isinstance(length, str):
            bad.append(BadRow(row.source, row.line, length))
        elif report.fits(row, length, config):
            kept.append(number)
            places.append(row)
            if length > most and has_files(rows[number].messages):
                most, heaviest = length, number
    pass_over(rows, bad, report.rows, config.bad_rows)
    report.kept = len(kept)
    if not kept:
        raise DataError(
            f"Every row is longer than --max-length {config.max_length} (the longest has {report.longest} tokens)."
        )
    dataset = datasets.Dataset.from_dict({NUMBER: kept})
    named = dict.fromkeys(name for number in kept for name in rows[number].extra.get("columns", ()))
    columns = [name for name in named if name not in TAKEN]
    dataset.set_transform(Examples(rows, example_of, encoder, kept, config.on_lost, columns))
    dataset.report, dataset.places = report, places
    dataset.heaviest = heaviest if most else None  # the number of the longest row that has files, for plans
    return dataset


def _length(row: Row, encoder: MediaEncoder, lost: Collection[str], example_of: ExampleOf, prompts: bool) -> int:
    """The number of tokens of a row, including those of its files; raises Problem for a row that cannot be used."""
    if row.kind != "chat":
        raise Problem("it is plain text among rows with files; use 'messages' or 'query'")
    odd = sorted({part["type"] for part in parts_of(row.messages)} & set(lost))
    if odd:
        raise Problem(f"it has a file of kind {odd[0]}, and TRL passes only images to vLLM")
    if row.extra.get("tools"):
        raise Problem("it has tools, among rows with files, and TRL's trainers would not show them to the model")
    files = encoder.heard(row)
    return max(encoder.length(row, conversation, files, prompts) for conversation in example_of(row)[1])
