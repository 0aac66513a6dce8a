"""Rows for retrieval: a query, texts that match it, texts that do not, and a score.

The forms are those of ms-swift (`positive_messages`, `negative_messages`; `response`, `rejected_response`) and of
sentence-transformers (`anchor`, `positive`, `negative`, `negative_1` ...).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardproof.data.forms.fields import kind_of, shown_fields
from shardproof.data.forms.formats import FIELDS, Form, Normal, checked_turn, opened
from shardproof.data.forms.likely import ANSWER, QUESTION, likely
from shardproof.data.forms.objects import check_filled
from shardproof.data.forms.parts import FILE_FIELDS, Problem, has_files, with_files
from shardproof.data.forms.preferences import PROMPTS
from shardproof.data.forms.texts import WRITE, check_texts

ANCHOR, LABEL = "anchor", "label"
POSITIVE, NEGATIVE = "positive", "negative"  # also in `Row.extra`: lists of texts, or of turns if they have files
FOUND = {
    POSITIVE: ("positive_messages", "positive", "response"),
    NEGATIVE: ("negative_messages", "negative", "rejected_response"),
}
FILES_FOUND = {f"{kind}_{name}": (kind, name) for kind in FOUND for name in FILE_FIELDS}  # ms-swift's names
MATCH_FIELDS = (*FIELDS, ANCHOR, *FOUND[POSITIVE][:2], *FOUND[NEGATIVE], *FILES_FOUND, LABEL)
RANKING_MEASURES = ("accuracy", "mrr", "ndcg")  # metrics of a reranker's evaluation besides the loss
LEARN_LABELS = "learn labels with --loss cosine_similarity or contrastive"
_NUMBERED = re.compile(r"negative_\d+")

Found = str | list[dict[str, Any]]  # a document


def turns_of_found(found: Found) -> list[dict[str, Any]]:
    """A document as a conversation."""
    return [{"role": "user", "content": found}] if isinstance(found, str) else found


@dataclass(frozen=True)
class Matches:
    """What a row must contain.

    Attributes:
        scored: whether its label says how well query and positive match; otherwise a positive always matches.
        binary: whether a label is 0 or 1.
        several: whether a query may have more than one positive.
        needed: whether anything besides a query is required.
        ranked: whether negatives are required.
        files: whether images, audio and video are allowed.
    """

    scored: bool = False
    binary: bool = False
    several: bool = False
    needed: bool = True
    ranked: bool = False
    files: bool = False

    def __call__(self, record: Any, columns: Mapping[str, str] | None = None) -> Normal:
        record = opened(record, columns)
        if record.get(ANCHOR) is not None:
            rest = {name: value for name, value in record.items() if name != ANCHOR and value is not None}
            record = {"query": record[ANCHOR], **rest}
        found = {kind: _found(record, kind) for kind in FOUND}
        used = {*(name for names in FOUND.values() for name in names), *filter(_NUMBERED.fullmatch, record), LABEL}
        used |= FILES_FOUND.keys()
        asked = {name: value for name, value in record.items() if name not in used}
        if not asked:
            raise Problem(f"it has none of 'messages', 'prompt' and 'query' ({shown_fields(record)})")
        try:
            messages, asked_with, kind = PROMPTS.normalise(asked, None)
        except Problem as problem:
            problem.columns = likely(record, QUESTION, ANSWER) or _two_sentences(record) or problem.columns
            raise
        if "tools" in asked_with:
            raise Problem(f"it has tools, which this task does not read: {WRITE}")
        texts = all(isinstance(one, str) for some in found.values() for one in some)
        if not self.files and (has_files(messages) or not texts):
            raise Problem("it has files, but this task takes text only")
        turns = [turn for some in found.values() for one in some for turn in turns_of_found(one)]
        check_filled(record, turns, "a text that is to be found or ranked")
        if self.needed:
            self._check(record, found)
        label = None if record.get(LABEL) is None else self._label(record[LABEL])
        rest = {name: value for name, value in record.items() if name not in FIELDS or name in used}
        return messages, {**found, LABEL: label, "columns": rest}, kind

    def _check(self, record: Mapping[str, Any], found: Mapping[str, list[Found]]) -> None:
        if not found[POSITIVE]:
            if empty := next((name for name in FOUND[POSITIVE] if record.get(name) is not None), None):
                raise Problem(f"field '{empty}' is empty")
            raise Problem(f"there is no 'positive', 'positive_messages' or 'response' ({shown_fields(record)})")
        if self.ranked and not found[NEGATIVE]:
            raise Problem(f"there is no 'negative' or 'negative_messages' to rank it before ({shown_fields(record)})")
        if len(found[POSITIVE]) > 1 and not self.several:
            raise Problem(f"it has {len(found[POSITIVE])} positives, but one is expected: make each a row")
        if self.scored and record.get(LABEL) is None:
            raise Problem(f"field 'label' is missing: how well the two texts match ({shown_fields(record)})")
        if self.scored and found[NEGATIVE]:
            raise Problem("it has negatives, but a row whose label is learned consists of two texts")

    def _label(self, value: Any) -> float:
        try:
            label = float(value) if isinstance(value, (int, float, str)) else math.nan
        except (ValueError, OverflowError):
            label = math.nan
        if not math.isfinite(label):
            raise Problem(f"field 'label' is {kind_of(value)}, but a number is expected")
        if not self.scored and label != 1 and self.needed:
            other = "make a negative of it" if self.several else LEARN_LABELS
            raise Problem(
                f"field 'label' is {label:g}, but this loss treats every positive as a match: {other}, or leave the "
                "row out"
            )
        if self.binary and label not in (0, 1):
            raise Problem(f"field 'label' is {label:g}, but --loss contrastive takes only 0 and 1")
        if self.scored and abs(label) > 1:
            raise Problem(f"field 'label' is {label:g}, but a similarity is between -1 and 1: scale labels accordingly")
        return label

    @property
    def form(self) -> Form:
        """The form of these rows."""
        more = ", with a 'label'" if self.scored else ", and if you like 'negative' or 'negative_messages'"
        return Form(self, f"'query' or 'messages', 'positive' or 'positive_messages'{more}.")


def _two_sentences(record: Mapping[str, Any]) -> str:
    """A value of --columns for a pair in the format of sentence-transformers."""
    if not {"sentence1", "sentence2"} <= record.keys():
        return ""
    return f"query=sentence1,positive=sentence2{',label=score' if 'score' in record else ''}"


def _found(record: Mapping[str, Any], kind: str) -> list[Found]:
    """The positives or the negatives of a record."""
    found: list[Any] = []
    for field in FOUND[kind]:
        if record.get(field) not in (None, "", []):
            found += _documents(record[field], field)
    if kind == NEGATIVE:
        for field in sorted(filter(_NUMBERED.fullmatch, record), key=lambda name: int(name.rpartition("_")[2])):
            if record[field] not in (None, ""):
                found += _documents(record[field], field)
    files = [_files(record, field, len(found)) for field in FILES_FOUND if field.startswith(f"{kind}_")]
    return [
        _document(value, at, {name: each[i] for name, each in filter(None, files)})
        for i, (value, at) in enumerate(found)
    ]


def _files(record: Mapping[str, Any], field: str, documents: int) -> tuple[str, list[Any]] | None:
    """The name of a row's file field, and the files of each document of a record."""
    value = record.get(field)
    if value in (None, "", []):
        return None
    listed = value if isinstance(value, list) else [value]
    if documents == 1 and (len(listed) != 1 or not isinstance(listed[0], list)):
        listed = [listed]
    if len(listed) != documents or not all(isinstance(one, list) for one in listed):
        kind, name = FILES_FOUND[field]
        raise Problem(f"field '{field}' must hold a list of {name} for each {kind}, of which there are {documents}")
    return FILES_FOUND[field][1], listed


def _documents(value: Any, field: str) -> list[tuple[Any, str]]:
    """A text, several texts, a conversation or several conversations, with the place of each; also written as JSON in a
    string."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return [(value, f"{field}[0]")]
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise Problem(f"field '{field}' is {kind_of(value)}, but a text, or a list of them, is expected")
    if value and all(isinstance(turn, dict) for turn in value):
        value = [value]
    return [(one, f"{field}[{i}]") for i, one in enumerate(value)]


def _document(value: Any, at: str, files: Mapping[str, Any]) -> Found:
    """A document as a text, or as turns if it has files."""
    if isinstance(value, str):
        turns: list[dict[str, Any]] = [{"role": "user", "content": value}]
    elif isinstance(value, list) and value:
        turns = [checked_turn(turn, i, at) for i, turn in enumerate(value)]
        # A document has no speaker, even if ms-swift writes it as an answer; as a user turn it may have files.
        check_texts(turns, at=at)
        turns = [{**turn, "role": "user"} if turn["role"] == "assistant" else turn for turn in turns]
    else:
        raise Problem(f"{at} is {kind_of(value)}, but a text or a list of turns is expected")
    try:
        turns = with_files(files, turns)
    except Problem as problem:
        raise Problem(f"{at}: {problem}") from None
    if has_files(turns):
        return turns
    text = "\n".join(turn["content"] for turn in turns)
    if not text.strip():
        raise Problem(f"{at} is empty")
    return text
