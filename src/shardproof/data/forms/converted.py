"""Records that a user's function converts to a known form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardproof.data.forms.fields import kind_of
from shardproof.data.forms.formats import Form, Normal, Problem, opened


@dataclass(frozen=True)
class Converted:
    """`normalise` of a form, after a user's function has converted records to that form."""

    form: Form
    name: str
    convert: Callable[[dict[str, Any]], dict[str, Any]]

    def __call__(self, record: Any, columns: Mapping[str, str] | None = None) -> Normal:
        try:
            found = self.convert(dict(opened(record, columns)))
        except ValueError as error:
            raise Problem(str(error) or f"the row format {self.name!r} refuses it") from error
        except Exception as error:  # the user's function may raise anything
            raise Problem(f"the row format {self.name!r} fails: {type(error).__name__}: {error}") from error
        if not isinstance(found, dict):
            raise Problem(f"the row format {self.name!r} returned {kind_of(found)}, not an object with fields")
        try:
            return self.form.normalise(found, None)
        except Problem as problem:
            raise Problem(str(problem)) from None  # without `columns`: --columns applies to records before conversion


def converted(form: Form, name: str, convert: Callable[[dict[str, Any]], dict[str, Any]]) -> Form:
    """The form of records that `convert` converts to `form`; `name` is for error messages.

    `convert` may return a record of any kind that `form` knows. Its ValueError says why a row is bad.
    """
    expected = f"rows that the row format {name!r} converts into {form.expected}"
    return replace(form, normalise=Converted(form, name, convert), expected=expected)
