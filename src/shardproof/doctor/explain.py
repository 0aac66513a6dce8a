"""Which known failure an error text tells of."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardproof.doctor.known_errors import KNOWN, Known

MOST = 200_000  # characters that are looked at: the end of a log


@dataclass(frozen=True)
class Match:
    """A known failure, and the line of the text that gave it away."""

    known: Known
    line: str


def explain(text: str) -> list[Match]:
    """The known failures that `text` tells of, the most telling first; none if there are none."""
    text = text[-MOST:]
    found = []
    for known in KNOWN:
        for pattern in known.patterns:
            hit = re.search(pattern, text, re.IGNORECASE)
            if hit:
                found.append((len(hit.group()), Match(known, _line_of(text, hit.start()))))
                break
    return [match for _, match in sorted(found, key=lambda pair: -pair[0])]


def _line_of(text: str, at: int) -> str:
    start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
    return text[start : end if end >= 0 else len(text)].strip()[:300]


def told(match: Match) -> str:
    """What is shown of a match."""
    known = match.known
    parts = [
        f"seen:     {match.line}",
        f"means:    {known.means}",
        f"why:      {known.why}",
        f"there:    {known.there}",
        f"here:     {known.here}",
        f"threads:  {', '.join(known.threads)}",
    ]
    if known.cases:
        parts.append(f"tried in: {', '.join(known.cases)} (docs/casebook.md)")
    return f"{known.name} ({known.engines})\n" + "\n".join(f"  {part}" for part in parts)
