"""Pairs and prompts with pictures, as TRL's trainers take them: checked before training, read when a batch is made.

TRL wants a column of pictures beside messages in which `{"type": "image"}` says where each of them stands, and does the
rest by the model's processor. What is kept is the number of a row: a transform of the dataset makes the example.
"""

from __future__ import annotations

import copy
import inspect
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardproof.data.beside import as_many_as_help, in_order
from shardproof.data.media import Limits, files_of
from shardproof.data.media_batch import OnLost
from shardproof.data.parts import Problem, parts_of
from shardproof.data.rows import BadRow, Places, Row, Rows, pass_over
from shardproof.errors import ConfigError, DataError
from shardproof.train.config import RunConfig
from shardproof.train.media import media_limits
from shardproof.train.models import tokenizer_of

log = logging.getLogger("shardproof")

NUMBER = "number of the row"  # the column of a dataset of pictures
PICTURED = ("dpo", "grpo", "rloo")  # the algorithms whose trainers take pictures

# What TRL wants of a row, and the conversations in it.
ExampleOf = Callable[[Row], tuple[dict[str, Any], list[list[dict[str, Any]]]]]


@dataclass(frozen=True)
class Examples:
    """From numbers of rows to examples with their pictures: what a dataset of pictures is transformed by.

    Attributes:
        numbers: of all rows of the dataset, in order.
        on_lost: what happens to a row whose file could be read before training and cannot be read now: with `skip` the
            next row that can be read takes its place, for TRL counts on as many as it asked for; `stop` raises.
    """

    rows: Rows
    example_of: ExampleOf
    limits: Limits
    numbers: Sequence[int]
    on_lost: OnLost

    def __call__(self, batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        examples = [self.example(number) for number in batch[NUMBER]]
        names = dict.fromkeys(name for example in examples for name in example)
        return {name: [example.get(name) for example in examples] for name in names}

    def example(self, number: int) -> dict[str, Any]:
        """Raises DataError for a file that is lost, if that stops the run, or if no row can be read any more."""
        first = bisect_left(self.numbers, number)
        for i in range(len(self.numbers)):
            row = self.rows[self.numbers[(first + i) % len(self.numbers)]]
            try:
                pictures = files_of(row, self.limits)["image"]
            except Problem as problem:
                if self.on_lost == "stop":
                    raise DataError(f"{row.where}: {problem}") from problem
                log.warning("%s is left out of its step, and another row takes its place: %s", row.where, problem)
            else:
                return self._example(row, pictures)
        raise DataError("No row can be read any more: the files of all of them are lost.")

    def _example(self, row: Row, pictures: list[Any]) -> dict[str, Any]:
        example, _ = self.example_of(row)
        turns = ("prompt", "chosen", "rejected")
        marked = {name: [in_parts(turn) for turn in example[name]] for name in turns if name in example}
        return {**example, **marked, "images": pictures}


def in_parts(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn whose content is a list, in which a picture is only a place."""
    content = turn["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return {**turn, "content": [part if part["type"] == "text" else {"type": part["type"]} for part in parts]}


def have_files(rows: Rows) -> bool:
    """Whether any row names a file."""
    return any(next(parts_of(row.messages), None) is not None for row in rows)


def are_pictured(dataset: Any) -> bool:
    return NUMBER in dataset.column_names


def processing_for(dataset: Any, processing: Any, generated: bool) -> Any:
    """What a trainer of TRL's is given: the processor for rows with pictures, else the tokenizer.

    Where answers are generated it pads on the left, as TRL does with the prompts themselves: the kinds of tokens that
    the processor pads would else stand beside other tokens.
    """
    tokenizer = tokenizer_of(processing)
    if not are_pictured(dataset) or not generated:
        return processing if are_pictured(dataset) else tokenizer
    from shardproof.train.sliced import cuts_pictures, with_rows

    processing = copy.copy(processing)
    processing.tokenizer = copy.deepcopy(tokenizer)
    processing.tokenizer.padding_side = "left"
    return with_rows(processing) if cuts_pictures(processing) else processing


def check_trainer(trainer: Any, processing: Any) -> None:
    """Raise ConfigError if this trainer of TRL's loses something that the processor makes of a picture.

    Those that generate hand on the tensors that they know by name; DPO's hands on all.
    """
    from PIL import Image

    scores = getattr(trainer, "_get_per_token_logps_and_entropies", None)
    if scores is None:
        return
    mark = processing.tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image", "image": ""}]}], tokenize=False
    )
    made = processing(text=[mark], images=[[Image.new("RGB", (64, 64))]], return_tensors="pt")
    lost = set(made) - {"input_ids", "attention_mask"} - set(inspect.signature(scores).parameters)
    if lost:
        raise ConfigError(
            f"TRL's {trainer.__name__} does not hand on what {type(processing).__name__} makes of a picture:"
            f" {', '.join(sorted(lost))}.\n--rlhf-type dpo does."
        )
    short, long = (len(ids) for ids in processing(text=["a", "a b a b"])["input_ids"])
    if short == long:
        raise ConfigError(
            f"{type(processing).__name__} pads texts unasked, and TRL's {trainer.__name__} would take padding for text."
        )


def check_model(model: Any) -> None:
    """Raise ConfigError if the model has no backbone that takes pictures: TRL asks it for hidden states, not logits."""
    backbone = model.base_model
    if backbone is model or "pixel_values" not in inspect.signature(type(backbone).forward).parameters:
        raise ConfigError(
            f"TRL needs a model whose towers and language model are one backbone, and {type(model).__name__} keeps them"
            " apart: it can be trained on pictures by 'shardproof sft' only."
        )


def encode_pictured(
    config: RunConfig, rows: Rows, processing: Any, example_of: ExampleOf, prompts: bool, report: Any
) -> Any:
    """A dataset of the rows that can be used and are not too long.

    Args:
        processing: the processor of the model.
        example_of: what TRL wants of a row, and the conversations whose longest counts.
        prompts: whether an answer is to follow.
        report: counts the rows.

    Raises:
        ConfigError: the model takes no pictures.
        DataError: a file cannot be used; a row is too long and may not be; no row is left.
    """
    import datasets

    tokenizer = tokenizer_of(processing)
    if processing is tokenizer:
        raise ConfigError(f"{rows[0].source}: its rows name files, and {config.model} is a model of text.")
    limits, bad, kept, places = media_limits(config, processing), [], [], Places()

    def length_of(number: int) -> tuple[Row, int | str]:
        row = rows[number]
        place = Row([], row.source, row.line)
        try:
            return place, _length(row, processing, limits, example_of, prompts)
        except Problem as problem:
            return place, str(problem)

    for number, (row, length) in enumerate(in_order(length_of, len(rows), as_many_as_help(config.workers))):
        if isinstance(length, str):
            bad.append(BadRow(row.source, row.line, length))
        elif report.fits(row, length, config):
            kept.append(number)
            places.append(row)
    pass_over(rows, bad, report.rows, config.bad_rows)
    report.kept = len(kept)
    if not kept:
        raise DataError(f"Every row is longer than --max-length {config.max_length} ({report.longest} tokens at most).")
    dataset = datasets.Dataset.from_dict({NUMBER: kept})
    dataset.set_transform(Examples(rows, example_of, limits, kept, config.lost_files))
    dataset.report, dataset.places = report, places
    return dataset


def _length(row: Row, processor: Any, limits: Limits, example_of: ExampleOf, prompts: bool) -> int:
    """Tokens of a row, those of its pictures among them; raises Problem for one that cannot be used."""
    from shardproof.data.encode import refusals
    from shardproof.data.template import Template

    if row.kind != "chat":
        raise Problem("it is a plain text among rows with pictures; give 'messages' or 'query'")
    kinds = {part["type"] for part in parts_of(row.messages)}
    if kinds - {"image"}:
        raise Problem(f"it has a file of kind {min(kinds - {'image'})}; preferences and rewards take pictures only")
    if row.extra.get("tools"):
        raise Problem("it has tools among rows with pictures, and TRL's trainers would not show them to the model")
    files = files_of(row, limits)["image"]
    template = Template(processor.tokenizer)
    lengths = []
    for conversation in example_of(row)[1]:
        with refusals():
            text = template.render(conversation, prompt=prompts)
        given = {"images": [files]} if files else {}
        try:
            lengths.append(len(processor(text=[text], **given)["input_ids"][0]))
        except Exception as error:  # whatever code of a model raises at files that it cannot take
            raise Problem(f"{type(processor).__name__} refuses it: {' '.join(str(error).split())[:300]}") from error
    return max(lengths)
