"""Match an error text to known failures."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from shardproof.doctor.known.errors import KNOWN
from shardproof.doctor.known.kind import Known

MOST = 1_000_000  # characters searched, from the end of a log

_COLOURS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
# What launchers and loggers write before each line: [rank1]:, 1:, [1,3]<stderr>:, (Worker pid=7, ip=...), a time,
# and the sides of rich's boxes.
_FRONT = re.compile(
    r"^(?:[ \t]*(?:\[?(?:default|rank|Rank )?\d+\]?:|\[\d+,\d+\]<std(?:err|out)>:|\(\w+ pid=\d+[^()\n]*\)"
    r"|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,]*Z?\]?|\[?(?:ERROR|WARNING|INFO)\]?(?= )|│))+ ?|(?<![ \t│])[ \t│]+$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Match:
    """A known failure, and the line of the text that matched."""

    known: Known
    line: str


def explain(text: str) -> list[Match]:
    """The known failures that `text` matches. Causes come before consequences of another error, these before a
    launcher's summary; otherwise in the order of the text, since a log continues after the error that matters."""
    text = _COLOURS.sub("", text[-MOST:]).replace("\r\n", "\n").replace("\r", "\n")
    text = _FRONT.sub("", text)
    found = []
    for known in KNOWN:
        hits = [hit for pattern in known.patterns if (hit := _compiled(pattern).search(text))]
        if hits:
            start, end = min(_span(hit) for hit in hits)
            last = 2 if known.summary else int(known.echo)
            found.append(((last, start, start - end), Match(known, _line_of(text, start, end))))
    return [match for _, match in sorted(found, key=lambda pair: pair[0])]


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """A space matches any white space: terminals and boxes break lines."""
    return re.compile(pattern.replace(" ", r"(?:\s+)"), re.IGNORECASE)


def _span(hit: re.Match[str]) -> tuple[int, int]:
    """The span of a hit that is shown."""
    return hit.span("told" if "told" in hit.re.groupindex else 0)


def _line_of(text: str, start: int, end: int) -> str:
    start, end = text.rfind("\n", 0, start) + 1, text.find("\n", end)
    return " ".join(text[start : end if end >= 0 else len(text)].split())[:300]


def told(match: Match) -> str:
    """The text shown for a match."""
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
