"""Chat templates that write the date: rows are rendered again in training, and must give the same text as before."""

from __future__ import annotations

import json
import re
from datetime import date
from typing import Any

_CALL = re.compile(r"""\bstrftime_now\(\s*(['"])([^'"\\]*)\1\s*\)""")  # transformers' function for templates


_DAY = "_rows_are_of"  # an attribute of the tokenizer, which travels to all ranks with it


def today() -> date:
    return date.today()


def day_of(tokenizer: Any) -> date:
    """The day on which encoding with this tokenizer began."""
    day: date = tokenizer.__dict__.setdefault(_DAY, today())
    return day


def keep_day(tokenizer: Any, day: date | None) -> None:
    """Use this day, on which the resumed run began, in rendered rows."""
    if day is not None:
        setattr(tokenizer, _DAY, day)


def writes_day(template: Any) -> bool:
    """Whether a chat template writes the date."""
    return isinstance(template, str) and bool(_CALL.search(template))


def on_day(template: Any, day: date) -> Any:
    """A chat template that writes this day, at 0:00, instead of the time of rendering."""
    if not isinstance(template, str):
        return template
    return _CALL.sub(lambda call: json.dumps(day.strftime(call[2]), ensure_ascii=False), template)
