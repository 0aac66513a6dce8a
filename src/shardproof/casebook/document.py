"""`casebook.json`, and the page that is generated from it."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import platform
from pathlib import Path
from typing import Any

from shardproof import __version__
from shardproof.casebook.case import all_cases, case_named
from shardproof.casebook.engines import FAMILIES, names_of
from shardproof.casebook.runner import Result
from shardproof.casebook.table import cell, heading, summary, worded
from shardproof.errors import ConfigError

PACKAGES = ("torch", "deepspeed", "transformers", "peft", "accelerate")
REPEAT = "make cases"

HEAD = """# The casebook

What people do with language models that breaks when the sharding strategy changes, from public threads. Each case
is a small file in `src/shardproof/casebook/cases/`. Every engine runs the same script. Its results must equal those
of one process that sees the data of all ranks: losses, gradient norms, generated tokens, saved files, and the full
weights at the end, in fp32 to a relative error of 1e-5 (the few exceptions are in the case's file).

This page is generated from `casebook.json` by `{repeat}`. {date}, {world} ranks, gloo, CPU, {limit:.0f} seconds per
case. {versions}.

- **equal**: the numbers of one process. **wrong**: different numbers without an exception, with the largest relative
  error. **error**: an exception. **hang**: no result within the time limit, and no rank computes. **n/a**: cannot be
  written for this engine.
- Peers run as documented: DDP plain, FSDP2 with `fully_shard` on every block and the model, DeepSpeed's ZeRO with
  torch's optimizer and its thresholds for small parameters at zero, so that a small model is sharded like a large
  one. A result that is not equal is run again in fresh processes, and the second result counts.
- `a > b`: the case as it is, then with a setting that the peer documents for it, which is named below the table.
  Ours has no such settings.
"""


def versions() -> dict[str, str]:
    found = {"shardproof": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def as_json(results: list[Result], world: int, limit: float) -> dict[str, Any]:
    """Everything the page needs."""
    names = list(dict.fromkeys(result.case for result in results))
    cases = {name: case_named(name) for name in names}
    return {
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "world": world,
        "limit": limit,
        "cases": [
            {
                "name": name,
                "users": cases[name].users,
                "classes": list(cases[name].classes),
                "threads": list(cases[name].threads),
                "diverges": cases[name].diverges,
                "results": [_plain(r) for r in results if r.case == name],
            }
            for name in names
        ],
    }


def _plain(result: Result) -> dict[str, Any]:
    """The result without the case's name; an infinite error, which JSON cannot hold, is null."""
    fields = {key: value for key, value in dataclasses.asdict(result).items() if key != "case"}
    return {**fields, "error": None if math.isinf(result.error) else result.error}


def results_of(content: dict[str, Any]) -> list[Result]:
    """The results in a casebook, engine by engine."""
    return [
        Result(case["name"], **{**fields, "error": math.inf if fields["error"] is None else fields["error"]})
        for case in content["cases"]
        for fields in case["results"]
    ]


def write_json(path: Path, results: list[Result], world: int, limit: float) -> None:
    path.write_text(json.dumps(as_json(results, world, limit), indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a casebook.

    Raises:
        ConfigError: there is none.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a casebook: {error}. 'shardproof cases' writes one.") from error
    return content


def kept(path: Path, names: list[str], engines: list[str], world: int, limit: float) -> list[Result]:
    """The results in a casebook that a run of `names` on `engines` does not replace.

    Raises:
        ConfigError: it was made with other versions, ranks or time limit.
    """
    content = read_json(path)
    for what, now in (("versions", versions()), ("world", world), ("limit", limit)):
        if content[what] != now:
            raise ConfigError(f"{path} was made with {what} {content[what]}, not {now}: run all cases again.")
    return [r for r in results_of(content) if r.case not in names or r.engine not in engines]


def ordered(results: list[Result]) -> list[Result]:
    """By case in the order of the book, then by engine in the order of the table."""
    cases, engines = list(all_cases()), names_of(list(FAMILIES), [0, 1, 2, 3])
    return sorted(results, key=lambda r: (cases.index(r.case) if r.case in cases else -1, engines.index(r.engine)))


def page(content: dict[str, Any]) -> str:
    """The page in Markdown."""
    results = results_of(content)
    engines = list(dict.fromkeys(r.engine for r in results))
    packages = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    lines = [
        HEAD.format(
            repeat=REPEAT,
            date=content["date"],
            world=content["world"],
            limit=content["limit"],
            versions=packages,
        ),
        "## Summary\n",
        *(f"- {text}" for text in summary(results)),
        f"\n## {len(content['cases'])} cases\n",
        f"| case | what users do | thread | {' | '.join(heading(e) for e in engines)} |",
        f"|---|---|---|{'---|' * len(engines)}",
    ]
    for case in content["cases"]:
        own = [r for r in results if r.case == case["name"]]
        cells = [cell([r for r in own if r.engine == engine]) for engine in engines]
        thread = case["threads"][0] if case["threads"] else ""
        lines.append(f"| {case['name']} | {case['users']} | {thread} | {' | '.join(cells)} |")
    lines.append("\n## What was seen\n")
    for case in content["cases"]:
        lines += _details(case, [r for r in results if r.case == case["name"]])
    return "\n".join(lines)


def _details(case: dict[str, Any], results: list[Result]) -> list[str]:
    """One case: its threads, and the results of engines that were not equal or needed a setting."""
    told: dict[str, list[str]] = {}
    for r in results:
        if r.status == "equal" and r.setting is None:
            continue
        place = f", in {r.text}" if r.status == "wrong" else f": {r.text}" if r.text else ""
        told.setdefault(f"{f'with {r.setting}: ' if r.setting else ''}{worded(r)}{_safe(place)}", []).append(
            heading(r.engine)
        )
    classes = f" (class {', '.join(map(str, case['classes']))})" if case["classes"] else ""
    lines = [
        f"### {case['name']}{classes}\n",
        f"{_sentence(case['users'])} {'Ranks differ. ' if case['diverges'] else ''}",
    ]
    if case["threads"]:
        lines[-1] += f"Threads: {', '.join(case['threads'])}."
    lines += ["", *(f"- {', '.join(who)} {what}" for what, who in told.items())]
    return [*lines, ""] if told else lines


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _safe(text: str) -> str:
    """A short line of an error text, without Markdown."""
    short = text if len(text) <= 200 else text[:197] + "..."
    return short.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
