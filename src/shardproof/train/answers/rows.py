"""Answer the questions of a dataset with a model, a few at a time, and write each answer as soon as it is there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shardproof.data.encoding.beside import as_many_as_help, in_order
from shardproof.data.forms.converted import converted
from shardproof.data.forms.formats import ANSWERS, TURNS, Form, Normal, opened, tools_of, turns_of, with_system
from shardproof.data.forms.objects import OBJECTS, placed
from shardproof.data.forms.parts import Problem, parts_of, text_of
from shardproof.data.forms.preferences import PROMPTS
from shardproof.data.rows import BadRow, BadRows, Row, Rows, pass_over, read_rows
from shardproof.errors import ConfigError, DataError
from shardproof.train.answers.chat import Chat, Question
from shardproof.train.answers.loaded import Loaded
from shardproof.train.answers.metrics import Metric, judged
from shardproof.train.answers.sampling import Sampling


def _asked(record: Any, columns: Mapping[str, str] | None = None, *, text_only: bool, plain: bool) -> Normal:
    messages, extra, kind = PROMPTS.normalise(record, columns)
    file = next(parts_of(messages), None)
    if file is not None and (text_only or plain or kind == "text"):
        why = "the model takes text only" if text_only else "only text can be continued as it is"
        raise Problem(f"it has a file of kind {file['type']}, and {why}")
    record = opened(record, columns)
    field = next((name for name in TURNS if name in record), None)
    last = turns_of(record, field)[-1] if field else {"role": "assistant", **_first(record)}
    own = [last] if last["role"] == "assistant" and last.get("content") is not None else []
    if own and record.get(OBJECTS):  # it gets the objects that the question leaves
        own = placed({OBJECTS: record[OBJECTS]}, [*messages, *own], spare=True)[-1:]
    return messages, {**extra, **tools_of(record), "own": own}, kind


def _first(record: Mapping[str, Any]) -> dict[str, Any]:
    return next(({"content": record[name]} for name in ANSWERS if record.get(name) is not None), {})


def _form(chat: Chat) -> Form:
    """The format of rows that this model can be asked."""
    asked = partial(_asked, text_only=chat.processing is chat.tokenizer, plain=chat.plain)
    return Form(asked, "'messages', 'query' or 'prompt': anything after the last question is ignored.")


def answer_rows(
    chat: Chat,
    dataset: Sequence[str],
    columns: Mapping[str, str],
    system: str | None,
    file: Path,
    sampling: Sampling,
    at_once: int,
    seed: int | None = None,
    bad_rows: BadRows = "stop",
    worth: Mapping[str, Metric] | None = None,
    row_format: tuple[str, Callable[[dict[str, Any]], dict[str, Any]]] | None = None,
) -> Iterator[tuple[int, int, Sequence[BadRow]]]:
    """Answer every row of `dataset` and write it to `file`, one JSON object per line, in order: the other columns of
    the row, `messages` with the answer at the end, `response`, and as `labels` the row's own answer (or null). So the
    file is itself a dataset. Ranks of a sharded model answer different rows; all call this.

    Args:
        system: the system message for rows that have none.
        at_once: how many rows a rank answers at a time, padded on the left; rows with files always one by one.
        seed: the sampling seed; for the same `at_once`, results do not depend on the number of ranks. None: a different
            one each time.
        bad_rows: as for `read_rows`.
        worth: metrics that score an answer against the row's own, by name. Lines then also have `rewards`.
        row_format: the name of a function that converts records to a known format, and the function. Its results are
            written.

    Yields: after each round, how many rows are written, how many there are, and which bad ones were skipped.

    Raises:
        DataError: a row cannot be read, is too long to be answered, or has files that cannot be used, or not by this
            model. No row is answered then.
        ConfigError: the file already exists.
    """
    import torch

    form = converted(_form(chat), *row_format) if row_format else _form(chat)
    rows = read_rows(dataset, bad_rows=bad_rows, columns=columns, form=form)
    if chat.limited or chat.processing is not chat.tokenizer:
        rows = usable(chat, rows, partial(_problem, chat, system), bad_rows)
    drawn = chat.shared(torch.seed) if seed is None else seed

    def answered(some: Sequence[Row], number: int) -> list[dict[str, Any]]:
        torch.manual_seed((drawn + number) % 2**63)
        texts = chat.answers([_question(chat, row, system) for row in some], sampling)
        made = [_line(row, _filled(chat, row, system), text) for row, text in zip(some, texts, strict=True)]
        return [_judged(line, worth) for line in made] if worth else made

    return write_lines(chat, rows, file, at_once, answered)


def _judged(line: dict[str, Any], worth: Mapping[str, Metric]) -> dict[str, Any]:
    if line["labels"] is None:
        return line
    return {**line, "rewards": judged(worth, line["response"], text_of(line["labels"]))}


def means_in(file: Path) -> tuple[dict[str, float], int]:
    """The mean scores of the answers in a file written by `answer_rows`, and how many were scored."""
    with file.open(encoding="utf-8") as lines:
        given = [found["rewards"] for line in lines if "rewards" in (found := json.loads(line))]
    return {name: sum(each[name] for each in given) / len(given) for name in (given[0] if given else ())}, len(given)


def _problem(chat: Chat, system: str | None, row: Row) -> str | None:
    """Why the model cannot be asked a row: it is too long, or its files cannot be used."""
    question = _question(chat, row, system)
    try:
        _filled(chat, row, system)
    except DataError as error:
        return str(error)
    return chat.problem(question) if chat.limited or chat.takes_files(question) else None


def usable(model: Loaded, rows: Rows, problem: Callable[[Row], str | None], bad_rows: BadRows) -> Rows:
    """The rows in which `problem` finds none; `skipped` lists the others. Raises DataError as `pass_over` does."""

    def found(number: int) -> str | None:
        return problem(rows[number])

    problems = model.shared(lambda: list(in_order(found, len(rows), as_many_as_help(1))))  # only one rank reads files
    good = [number for number, why in enumerate(problems) if why is None]
    bad = [BadRow(row.source, row.line, why) for row, why in zip(rows, problems, strict=True) if why is not None]
    pass_over(rows, bad, len(good), bad_rows)
    return rows.take(good)


def write_lines(
    model: Loaded,
    rows: Rows,
    file: Path,
    at_once: int,
    answered: Callable[[Sequence[Row], int], list[dict[str, Any]]],
) -> Iterator[tuple[int, int, Sequence[BadRow]]]:
    """Write a line for each row, in order; ranks make the lines of different rows. All of them call this.

    Args:
        at_once: how many rows a rank takes at a time.
        answered: makes the lines of some rows, or of none if a rank has none left; it is passed the number of the
            first.

    Yields: after each round, how many rows are written, how many there are, and which bad ones were skipped.

    Raises:
        ConfigError: the file already exists.
    """
    if model.shared(file.exists):
        raise ConfigError(f"{file} already exists. Name another file with --result-path, or move it.")
    if model.first:
        file.parent.mkdir(parents=True, exist_ok=True)
    rank, ranks = model.place
    with open(file if model.first else os.devnull, "x" if model.first else "w", encoding="utf-8") as out:
        for start in range(0, len(rows), at_once * ranks):
            end = min(start + at_once * ranks, len(rows))
            first = start + rank * at_once
            mine = [rows[i] for i in range(first, min(first + at_once, end))]
            for line in model.told(answered(mine, first)):
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()
            yield end, len(rows), rows.skipped


def _question(chat: Chat, row: Row, system: str | None) -> Question:
    return Question(_messages(row, system), chat.plain or row.kind == "text", row.source, row.extra.get("tools"))


def _messages(row: Row, system: str | None) -> list[dict[str, Any]]:
    return row.messages if row.kind == "text" else with_system(row.messages, system)


def _filled(chat: Chat, row: Row, system: str | None) -> list[dict[str, Any]]:
    """The question, followed by the row's own answer if it has one, with objects in the format of the model."""
    return chat.filled([*_messages(row, system), *row.extra["own"]], row.source)


def _line(row: Row, turns: list[dict[str, Any]], text: str) -> dict[str, Any]:
    kept = {name: value for name, value in row.extra["columns"].items() if name not in ANSWERS}
    asked = turns[: len(turns) - len(row.extra["own"])]
    own = turns[-1]["content"] if row.extra["own"] else None
    answered = [*asked, {"role": "assistant", "content": text}]
    return {**kept, "messages": answered, "response": text, "labels": own}
