"""The number that a solution ends with."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

_NUMBER = re.compile(r"-?(?:\d[\d,]*\.?\d*|\.\d+)")


def number_of(text: str) -> Decimal | None:
    """The number that a solution ends with: the one after `####`, or else in `\\boxed{}`, or else the last number."""
    marked = text.rpartition("####")[2] if "####" in text else ""
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    found = _NUMBER.findall(marked)[:1] or (_NUMBER.findall(boxed[-1]) if boxed else []) or _NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "")) if found else None
    except InvalidOperation:
        return None
