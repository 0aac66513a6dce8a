"""Rows of preferences and prompts in TRL's format."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shardproof.data.encoding.beside import as_many_as_help
from shardproof.data.forms.fields import kind_of
from shardproof.data.forms.formats import SUPERVISED, Form, with_system
from shardproof.data.forms.parts import Problem
from shardproof.data.forms.preferences import JUDGED, PAIRS, PROMPTS
from shardproof.data.rows import BadRow, Places, Rows, pass_over
from shardproof.data.sources.ready import RowSource
from shardproof.errors import ConfigError, DataError
from shardproof.models.loading.processors import processor_class
from shardproof.train.model.loading import first_line, tokenizer_of
from shardproof.train.options.rlhf_config import REWARDED, RlhfConfig, writes_all_answers
from shardproof.train.rlhf.algorithms import ALGORITHMS
from shardproof.train.rlhf.behind import BEHIND, tokens_behind
from shardproof.train.rlhf.environments import Shown
from shardproof.train.rlhf.pictures import encode_pictured, first_with_files
from shardproof.train.rlhf.reward_calls import TAKEN
from shardproof.train.rlhf.tools import check_called
from shardproof.train.rows.cached import encoded_once


def form_of(config: RlhfConfig) -> Form:
    """The format of the rows."""
    return PROMPTS if writes_all_answers(config) else ALGORITHMS[config.rlhf_type].form


@dataclass
class PairReport:
    """How many rows were kept, and how long they are."""

    rows: int = 0
    kept: int = 0
    longest: int = 0
    cut: int = 0
    longest_kept: int = 0
    longest_at: str = ""
    largest_token: int = 0
    largest_at: str = ""

    def fits(self, row: Any, length: int, config: RlhfConfig) -> bool:
        """Count a row of `length` tokens. Returns whether it is short enough.

        Raises:
            DataError: it is too long, with --truncation raise.
        """
        self.rows += 1
        self.longest = max(self.longest, length)
        if length > config.max_length and config.truncation == "raise":
            raise DataError(f"{row.where}: the row has {length} tokens, but --max-length is {config.max_length}.")
        fits = length <= config.max_length
        if length > self.longest_kept and (fits or config.truncation != "drop"):
            self.longest_kept, self.longest_at = length, row.where
        return fits

    def plus(self, other: PairReport) -> PairReport:
        """The report for both sets of rows together."""
        longest = max(self, other, key=lambda report: report.longest_kept)
        largest = max(self, other, key=lambda report: report.largest_token)
        return PairReport(
            **{name: getattr(self, name) + getattr(other, name) for name in ("rows", "kept", "cut")},
            longest=max(self.longest, other.longest),
            **{name: getattr(longest, name) for name in ("longest_kept", "longest_at")},
            **{name: getattr(largest, name) for name in ("largest_token", "largest_at")},
        )

    def __str__(self) -> str:
        text = f"{self.kept:,} rows of up to {self.longest:,} tokens"
        return text + (f"; {self.rows - self.kept:,} left out as too long" if self.rows > self.kept else "")


def encode(config: RlhfConfig, rows: Any, processing: Any, files_at: str | None = None) -> Any:
    """A dataset in TRL's format, without the rows that are too long. Its attribute `report` says how many were dropped.

    Args:
        files_at: the location of a row with files in this run; by default searched for in these rows only.
    """
    check_called(config, processing)
    if files_at := first_with_files(rows) if files_at is None else files_at:
        if config.precompute_ref:
            raise ConfigError("--precompute-ref works with text only, and these rows have files.")
        for judge in config.reward_model:
            _check_reads(config, "--reward-model", judge)
        if config.teacher_model:
            _check_reads(config, "--teacher-model", config.teacher_model)
        if config.teacher_model_server:
            raise ConfigError("--teacher-model-server takes text only, and these rows have files.")
        for option in ("tools", "environments"):
            if getattr(config, option):
                raise ConfigError(
                    f"--{option}: functions can be called in rows of text only, and these rows have files."
                )
        if config.use_vllm and config.rlhf_type == "gkd":
            raise ConfigError("--use-vllm: in gkd vLLM generates answers for text only, and these rows have files.")
        if config.dynamic_sample:
            raise ConfigError("--dynamic-sample works with text only, and these rows have files.")
        if config.group_by_length:
            raise ConfigError(
                "--group-by-length: the number of tokens of a row with files is known only during training."
            )
        prompts = config.rlhf_type in REWARDED
        if processing is tokenizer_of(processing):
            raise ConfigError(f"{files_at}: rows name files, but {config.model} is a text model.")
        if isinstance(rows, Rows) and rows.ready:
            raise ConfigError("--cached-dataset: in rlhf rows with files are encoded in each run. Name their files.")
        return encode_pictured(config, rows, processing, partial(example_of, config), prompts, PairReport())
    to_learn, answered = partial(_encoded, config, tokenizer=tokenizer_of(processing)), writes_all_answers(config)
    _check_kept(config, rows)
    return encoded_once(config, rows, processing, to_learn, PairReport, seq_kd=answered)


def _encoded(config: RlhfConfig, rows: Any, tokenizer: Any) -> Any:
    """The same for rows of text, with the `numbers` of those that are kept."""
    import datasets
    import pyarrow

    report, kept, places, bad, numbers = PairReport(), [], Places(), list[BadRow](), array("q")
    for row, (example, found) in _examples(config, rows, tokenizer):
        if isinstance(found, str):
            bad.append(BadRow(row.source, row.line, found))
            continue
        length, largest = found
        fits = report.fits(row, length, config)
        if example is None or (config.truncation == "drop" and not fits):
            continue
        report.cut += not fits
        if largest > report.largest_token:
            report.largest_token, report.largest_at = largest, row.where
        kept.append(example)
        places.append(row)
        numbers.append(report.rows + len(bad) - 1)
    pass_over(rows, bad, report.rows, config.bad_rows)
    report.kept = len(kept)
    if not kept:
        raise DataError(
            f"Every row is longer than --max-length {config.max_length} (the longest: {report.longest} tokens).\n"
            "Raise --max-length."
        )
    if mixed := _mixed_column(kept, places):
        raise DataError(mixed)
    names = dict.fromkeys(name for example in kept for name in example)  # of all rows, since the first may lack some
    try:
        # Without JSON columns, each object would get the keys of all others, for example in tool calls.
        columns = {name: [example.get(name) for example in kept] for name in names}
        dataset = datasets.Dataset.from_dict(columns, on_mixed_types="use_json")
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
        raise DataError(f"The rows cannot be combined into one table: {first_line(error)}") from error
    dataset.report, dataset.places, dataset.numbers = report, places, numbers
    return dataset


def _check_reads(config: RlhfConfig, option: str, model: str) -> None:
    """Raise ConfigError for another model that does not process files in the same way as the trained one."""
    ours, theirs = processor_class(config.model), processor_class(model)
    if theirs is None:
        raise ConfigError(f"{option} {model} is a text model, but these rows have files, which it must read too.")
    if ours not in (None, theirs):
        raise ConfigError(
            f"{option} {model} has a {theirs}, and {config.model} a {ours}. These rows have files, and both models"
            f" get them in the same form: use a model of the same family."
        )


def _mixed_column(examples: Sequence[dict[str, Any]], places: Places) -> str:
    """The message for a column with values of two kinds, or an empty string."""
    kinds: dict[str, tuple[str, int]] = {}
    for number, example in enumerate(examples):
        for column, value in example.items():
            if value is None:
                continue
            kind = "a number" if isinstance(value, (int, float)) else kind_of(value)
            first, at = kinds.setdefault(column, (kind, number))
            if kind != first:
                return (
                    f"The column {column!r} holds {first} in {places[at]} and {kind} in {places[number]}.\n"
                    "Give it one kind of value in all rows: rewards get the whole column."
                )
    return ""


# TRL's example for a row, or None if truncation would leave too little of it; and its number of tokens and largest
# token id, or why it cannot be used.
Example = tuple[dict[str, Any] | None, tuple[int, int] | str]


def _examples(config: RlhfConfig, rows: Any, tokenizer: Any) -> Iterator[tuple[Any, Example]]:
    from shardproof.data.encoding.agents import goes_on
    from shardproof.data.encoding.encode import Encoder, begin_of_text, walk
    from shardproof.data.encoding.seen import Seen
    from shardproof.data.encoding.template import Template

    first: Any = next(iter(rows), None)
    template = Template(tokenizer) if first is not None and first.kind == "chat" else None
    seen = Seen(template, config.system) if template is not None else None
    behind = Encoder(tokenizer, "answer", None) if config.rlhf_type == "gkd" else None
    within = template is not None and goes_on(tokenizer.chat_template)
    prompts, shown = ALGORITHMS[config.rlhf_type].form is PROMPTS, Shown(config)
    # TRL has the tokenizer add it.
    begin = begin_of_text(tokenizer) if first is not None and first.kind == "text" else ""

    def made(some: Iterable[Any]) -> Iterator[tuple[Any, Example]]:
        for row in some:
            _check_kind(row, first)
            if begin and row.messages[0]["content"].startswith(begin):
                prompt = row.messages[0]["content"].removeprefix(begin)
                row = replace(row, messages=[{**row.messages[0], "content": prompt}, *row.messages[1:]])
            try:
                example, conversations = example_of(config, row, seen)
                if within and config.rlhf_type != "rm" and example.get("prompt", [{}])[-1].get("role") == "tool":
                    raise Problem(
                        "with this --agent-template its answer continues after a tool result, but TRL starts a new"
                        " answer after each prompt: end the prompt with a question, or use hermes"
                    )
                tools = shown.of(row)
                each = [_tokens(turns, row, template, seen, tokenizer, prompts, tools) for turns in conversations]
                _refuse_tools(config, row)
                if behind is not None:
                    example[BEHIND] = tokens_behind(behind, example["messages"])
            except Problem as problem:
                yield row, (None, str(problem))
            else:
                length, largest = max(map(len, each)), max(token for tokens in each for token in tokens or [0])
                lost = length > config.max_length and _loses(config, example, row, length, template, tokenizer)
                yield row, (None if lost else example, (length, largest))

    yield from walk(rows, made, as_many_as_help(config.workers))


def _check_kind(row: Any, first: Any) -> None:
    """Raise DataError for a row that is plain text if the first is a conversation, or the other way round."""
    if row.kind != first.kind:
        texts, chats = (row, first) if row.kind == "text" else (first, row)
        raise DataError(
            f"{texts.where} is plain text and {chats.where} is a conversation, and a run cannot mix the two.\nWrite"
            " the text as a conversation ('messages', or 'query' and 'response'), or train on one of the two."
        )


def _tokens(
    conversation: list[dict[str, Any]],
    row: Any,
    template: Any,
    seen: Any,
    tokenizer: Any,
    prompt: bool,
    tools: list[Any] | None,
) -> Sequence[int]:
    """The tokens of one conversation of a row; raises Problem if the template refuses it or omits a part of it."""
    from shardproof.data.encoding.seen import refusals

    if row.kind == "chat":
        with refusals():
            seen.check(row, conversation)
            text = template.render(conversation, prompt=prompt, tools=tools)
        return tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]
    text, end = "".join(turn["content"] for turn in conversation), tokenizer.eos_token or ""
    ended = text if prompt or text.endswith(end) else text + end  # as TRL does
    return tokenizer(ended)["input_ids"]  # type: ignore[no-any-return]


def _loses(config: RlhfConfig, example: dict[str, Any], row: Any, length: int, template: Any, tokenizer: Any) -> bool:
    """Whether truncating a row of `length` tokens leaves nothing of its answer, or of its question, without which gkd's
    trainer fails."""
    if config.truncation == "right":
        return _question(example, row, template, tokenizer) >= config.max_length
    if config.truncation == "left" and config.rlhf_type == "gkd":
        return length - _question(example, row, template, tokenizer) >= config.max_length
    return False


def _question(example: dict[str, Any], row: Any, template: Any, tokenizer: Any) -> int:
    """The number of tokens before the answer."""
    if row.kind != "chat":
        return len(tokenizer(example["prompt"])["input_ids"])
    before = example["prompt"] if "prompt" in example else example["messages"][:-1]
    text = template.render(before, prompt=True, tools=row.extra.get("tools"))
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def example_of(config: RlhfConfig, row: Any, seen: Any = None) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """TRL's example for a row, and the conversations in it. `seen`: what the chat template shows, for conversations.

    Raises:
        Problem: the algorithm would ignore something in the row.
    """
    form, chat = form_of(config), row.kind == "chat"
    _refuse_passed_over(config, row)

    def words(part: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [_bare(turn) for turn in (part if seen is None else seen.in_its_words(part))]

    split = row.extra.get("split", len(row.messages))
    turns, answer = words(row.messages[:split]), words(row.messages[split:])
    split, turns = len(turns), turns + answer
    if chat:
        before, turns = len(turns), with_system(turns, config.system)
        split += len(turns) - before

    def said(part: list[dict[str, Any]]) -> Any:
        return part if chat else part[0]["content"]

    conversations = [turns]
    if form is PAIRS:
        worse = words(row.extra["rejected"])
        example = {"prompt": said(turns[:split]), "chosen": said(turns[split:]), "rejected": said(worse)}
        conversations.append(turns[:split] + worse)
    elif form is JUDGED:
        example = {"prompt": said(turns[:split]), "completion": said(turns[split:]), "label": row.extra["label"]}
    elif config.rlhf_type == "gkd" and form is PROMPTS and chat:
        example = {"messages": [*turns, {"role": "assistant", "content": ""}]}
    elif config.rlhf_type != "gkd" and form is PROMPTS:
        columns = {name: value for name, value in row.extra["columns"].items() if name not in TAKEN}
        example = {**columns, "prompt": said(turns)}
    elif not chat:
        raise DataError(f"{row.where}: --rlhf-type gkd needs conversations, such as 'messages' or 'query'.")
    else:
        example = {"messages": turns}
    if row.extra.get("tools") and form is not PROMPTS:
        example["tools"] = row.extra["tools"]
    return example, conversations


def _refuse_passed_over(config: RlhfConfig, row: Any) -> None:
    """Raise Problem for anything in a row that the algorithm would ignore."""
    if config.rlhf_type == "rm" and row.extra.get("margin"):
        raise Problem("it has a 'margin', which is not used here: remove that column")
    if config.taught and row.extra.get("columns", {}).get("teacher_prompt"):
        raise Problem(
            "it has a 'teacher_prompt', but the teacher gets the same prompt as the model: remove that column"
        )
    if config.rlhf_type == "gkd" and form_of(config) is SUPERVISED:
        *before, last = [(i, turn) for i, turn in enumerate(row.messages) if turn["role"] == "assistant"]
        if not last[1].get("loss", True):
            raise Problem("its last answer has 'loss': false, and gkd learns no other answer: remove the row")
        if marked := [i for i, turn in before if turn.get("loss")]:
            raise Problem(f"messages[{marked[0]}] has 'loss': true, but gkd learns only the last answer: remove it")


def _refuse_tools(config: RlhfConfig, row: Any) -> None:
    """Raise Problem for tools that TRL's trainer would not show to the model."""
    if ALGORITHMS[config.rlhf_type].experimental and row.extra.get("tools"):
        raise Problem(f"it has tools, and with --rlhf-type {config.rlhf_type} the model would not see them")


def _check_kept(config: RlhfConfig, rows: Any) -> None:
    """Raise DataError for a row from a folder of encoded rows in which this run would ignore something, and for rows of
    different kinds from different folders."""
    refuses = config.rlhf_type == "rm" or config.teacher_model or ALGORITHMS[config.rlhf_type].experimental
    for source, pairs in rows.by_source() if isinstance(rows, Rows) and rows.ready else ():
        _check_kind(rows[pairs[0][0]], rows[0])
        if not (refuses and isinstance(source, RowSource)):
            continue
        for _, record in pairs:
            row = source.row(record)
            try:
                _refuse_passed_over(config, row)
                _refuse_tools(config, row)
            except Problem as problem:
                raise DataError(
                    f"{source.name}: {row.where}: {problem}.\nEncode the rows again for this run."
                ) from None


def _bare(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn as TRL's templates expect it."""
    return {name: value for name, value in turn.items() if name != "loss"}
