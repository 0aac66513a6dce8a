"""The record of one kind of failure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """One kind of failure.

    Args:
        name: of the failure.
        engines: where it is met.
        patterns: regular expressions, any of which identifies it (case is ignored; a space is any white space). If
            one has a group `told`, only that group is shown: the rest has to stand near it.
        means, why: what has happened, and what causes it.
        there: what people do about it in those engines; `here` what is different in shardproof.
        threads: public ones.
        cases: those of the casebook that reproduce it.
        echo: whether it follows from another error, or from none, and so is shown after all others.
        summary: whether it only lists what failed, and so is shown after the echoes too.
    """

    name: str
    engines: str
    patterns: tuple[str, ...]
    means: str
    why: str
    there: str
    here: str
    threads: tuple[str, ...]
    cases: tuple[str, ...] = ()
    echo: bool = False
    summary: bool = False
