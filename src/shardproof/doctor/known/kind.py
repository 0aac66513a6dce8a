"""The record of one kind of failure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """One kind of failure.

    Args:
        name: the name of the failure.
        engines: the engines in which it occurs.
        patterns: regular expressions, any of which identifies it (case is ignored; a space is any white space). If
            one has a group `told`, only that group is shown: the rest has to be near it.
        means, why: what has happened, and what causes it.
        there: the fixes used in those engines; `here`: what is different in shardproof.
        threads: public threads about it.
        cases: the cases of the casebook that reproduce it.
        echo: whether it only follows from another error, or from none, so that it is shown after all others.
        summary: whether it only lists what failed, so that it is shown even after the echoes.
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
