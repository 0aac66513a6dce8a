"""Rows with labels: the forms a label may have, and the number, numbers or places that it becomes.

The forms are those of ms-swift: `label` is the number of a label, a list of such numbers if a row may have several, a
number to predict, or a list of these. If labels have names, a name may be used instead of its number.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from shardproof.data.forms.fields import kind_of, shown_fields
from shardproof.data.forms.formats import ANSWERS, FIELDS, TURNS, Form, Normal, normalise, opened, turns_of
from shardproof.data.forms.parts import Problem
from shardproof.data.forms.preferences import PROMPTS
from shardproof.data.forms.written import read_out

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
SINGLE: ProblemType = "single_label_classification"
MULTI: ProblemType = "multi_label_classification"
REGRESSION: ProblemType = "regression"
# Metrics of an evaluation besides the loss.
MEASURES = {SINGLE: ("accuracy", "macro_f1"), MULTI: ("accuracy", "macro_f1"), REGRESSION: ("mae", "pearson")}
LABEL = "label"  # the field
LABELLED_FIELDS = (*FIELDS, LABEL)
SHOWN = 12  # names listed in an error message

Label = int | float | list[int] | list[float]


@dataclass(frozen=True)
class Labels:
    """The labels of a run, in the order of their numbers.

    Attributes:
        names: the name of each label, or of each predicted value in a regression.
        problem: what a row is labelled with: one label, any number of labels, or as many numbers as there are names.
    """

    names: tuple[str, ...]
    problem: ProblemType

    @classmethod
    def numbered(cls, count: int, problem: ProblemType | None = None) -> Labels:
        """Labels without names of their own; by default, `problem` is a regression if there is only one."""
        names = tuple(f"LABEL_{i}" for i in range(count))  # what transformers calls labels without a name
        return cls(names, problem or (REGRESSION if count == 1 else SINGLE))

    @cached_property
    def named(self) -> bool:
        return self.names != Labels.numbered(len(self.names)).names

    @cached_property
    def _numeric(self) -> bool:
        return all(name.isdecimal() for name in self.names)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in reversed(list(enumerate(self.names)))}

    @property
    def config(self) -> dict[str, Any]:
        """The entries for them in a model's config."""
        numbers = dict(enumerate(self.names))
        return {"id2label": numbers, "label2id": {n: i for i, n in numbers.items()}, "problem_type": self.problem}

    @property
    def expected(self) -> str:
        one = f"one of {some_labels(self.names)}" if self.named else f"a whole number from 0 to {len(self.names) - 1}"
        many = f"a list of labels ({one})"
        numbers = "a number" if len(self.names) == 1 else f"a list of {len(self.names)} numbers"
        return {SINGLE: one, MULTI: many, REGRESSION: numbers}[self.problem]

    def shown(self, number: int) -> str | int:
        """This label as the user knows it: its name, if it has one, or its number."""
        return self.names[number] if self.named else number

    def told(self, label: Label) -> Any:
        """The result of `of` as the user knows it."""
        if self.problem == REGRESSION:
            return label
        return [self.shown(int(i)) for i in label] if isinstance(label, list) else self.shown(int(label))

    def of(self, value: Any) -> Label:
        """The target for the field `label`: the number of a label, the numbers of several, in order, or the values to
        predict.

        Raises:
            Problem: it is none of these labels.
        """
        if self.problem == SINGLE:
            return self._number(value)
        if self.problem == REGRESSION and len(self.names) == 1 and not isinstance(value, list):
            return _float(value)
        values = read_out(value)
        if self.problem == MULTI and not isinstance(values, list):
            values = [values]
        if not isinstance(values, list):
            raise Problem(f"field 'label' is {kind_of(value)}, but {self.expected} is expected")
        if self.problem == REGRESSION:
            if len(values) != len(self.names):
                raise Problem(f"field 'label' holds {len(values)} number(s), but {len(self.names)} are expected")
            return [_float(one) for one in values] if len(values) > 1 else _float(values[0])
        if values and all(isinstance(one, (bool, float)) for one in values):
            return self._places(values)
        numbers = [self._number(one) for one in values]
        if len(set(numbers)) < len(numbers):
            raise Problem(
                "field 'label' names a label twice: it must list the labels of the row (or, for a yes or no per "
                "label, contain true and false, or 1.0 and 0.0)"
            )
        return sorted(numbers)

    def _number(self, value: Any) -> int:
        """The number of one label, given by its number or its name."""
        count, numeric = len(self.names), self._numeric
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # a table with missing values turns whole numbers into floats
        if numeric and type(value) is int:
            value = str(value)  # --label-names 1 2 3 4 5
        if isinstance(value, str) and value in self._numbers:
            return self._numbers[value]
        if isinstance(value, str) and value.strip().isdecimal() and not numeric:
            value = int(value)  # CSV has only text
        if isinstance(value, str):
            if not self.named:
                raise Problem(f"field 'label' is the text {value!r:.60}, but labels have no names: add --label-names")
            near = _near(value, self.names)
            hint = f"; did you mean {near!r}?" if near else f": they are {some_labels(self.names)}"
            raise Problem(f"field 'label' is {value!r:.60}, but no label has that name{hint}")
        if isinstance(value, bool) and count == 2:
            return int(value)
        if type(value) is not int:
            raise Problem(f"field 'label' is {kind_of(value)}, but {self.expected} is expected")
        if not 0 <= value < count:
            raise Problem(f"field 'label' is {value}, but the {count} labels are numbered from 0 to {count - 1}")
        return value

    def _places(self, values: Sequence[float]) -> list[int]:
        """The numbers of the labels whose entry is 1.0 or true."""
        if len(values) != len(self.names) or not set(values) <= {0.0, 1.0}:
            raise Problem(f"field 'label' holds {len(values)} yes or no, but there are {len(self.names)} labels")
        return [i for i, value in enumerate(values) if value]


def _float(value: Any) -> float:
    try:
        found = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise Problem(f"field 'label' is {kind_of(value)}, but a finite number is expected")
    return found


@lru_cache(1024)
def _near(value: str, names: tuple[str, ...]) -> str | None:
    """The name that may have been meant. Cached: finding it among thousands takes a while, and rows repeat their
    mistakes."""
    return next(iter(difflib.get_close_matches(value, names, n=1)), None)


def some_labels(names: Sequence[str]) -> str:
    """The first few of them: there may be thousands."""
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


@dataclass(frozen=True)
class _Labelled:
    """`normalise` for rows with labels. Besides tools, `Row.extra` has `label`, from `Labels.of`, and `columns`, every
    field that is not part of the conversation."""

    labels: Labels
    needed: bool

    def __call__(self, record: Any, columns: Mapping[str, str] | None = None) -> Normal:
        record = opened(record, columns)
        given = record.get(LABEL)
        if given is None and self.needed:
            state = "is null" if LABEL in record else "is missing"
            raise Problem(f"field 'label' {state} ({shown_fields(record)})")
        label = None if given is None else self.labels.of(given)
        field = next((name for name in TURNS if record.get(name) is not None), None)
        answered = any(record.get(name) not in (None, "") for name in ANSWERS)
        if field is not None:
            answered = turns_of(record, field)[-1]["role"] == "assistant"
        read: Callable[..., Normal] = normalise if answered else PROMPTS.normalise
        messages, extra, kind = read(record, None)
        tools = {"tools": extra["tools"]} if "tools" in extra else {}
        rest = {name: value for name, value in record.items() if name not in FIELDS}
        return messages, {**tools, LABEL: label, "columns": rest}, kind


def labelled(labels: Labels, needed: bool = True) -> Form:
    """The form of rows with these labels: a conversation, with or without an answer, and `label`."""
    return Form(_Labelled(labels, needed), f"'messages', 'query' or 'prompt', with 'label': {labels.expected}.")
