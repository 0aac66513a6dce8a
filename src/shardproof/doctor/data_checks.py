"""Checks of the rows and the tokenizer: over the whole set, before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from shardproof.data.encode import EncodeReport
from shardproof.doctor.check import Check, some
from shardproof.errors import ConfigError, DataError
from shardproof.train.config import SftConfig

AREA = "data"


def rows(found: Any, leave_out: bool) -> list[Check]:
    """`found`: rows that were read with bad ones left out; whether the run does so, too."""
    bad = [str(row) for row in found.skipped]
    total = len(found) + len(bad)
    if bad and leave_out:
        return [Check(AREA, "rows", "warn", f"{len(bad)} of {total:,}: {some(bad)}", "They are left out.")]
    if bad:
        cause = "A run stops at these rows before it begins."
        return [
            Check(
                AREA, "rows", "fail", f"{len(bad)} of {total:,}: {some(bad)}", cause, "repair them, or --bad-rows skip"
            )
        ]
    return [Check(AREA, "rows", "ok", f"{total:,}")]


def files(found: Any, limits: Any) -> list[Check]:
    """Whether every picture, sound and video that rows name can be read."""
    from shardproof.data.media import files_of
    from shardproof.data.parts import Problem, parts_of

    count, lost = 0, []
    for row in found:
        named = sum(1 for _ in parts_of(row.messages))
        if not named:
            continue
        count += named
        try:
            files_of(row, limits)
        except Problem as problem:
            lost.append(f"{row.where}: {problem}")
    if lost:
        cause = "The run would end at this row, or train without it."
        return [
            Check(
                AREA,
                "files",
                "fail",
                f"{len(lost)} of {count:,}: {some(lost)}",
                cause,
                "--media-root, or repair the rows",
            )
        ]
    return [Check(AREA, "files", "ok", f"{count:,} can be read")] if count else []


def special_tokens(tokenizer: Any) -> list[Check]:
    """Whether each special token is there once, and ends what it should end."""
    problems = []
    numbers: dict[str, set[int]] = {}
    for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        numbers.setdefault(str(token).strip(), set()).add(number)
    for text, ids in numbers.items():
        if len(ids) > 1:
            problems.append(f"{text!r} is {len(ids)} tokens: {', '.join(map(str, sorted(ids)))}")
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id == tokenizer.bos_token_id:
        problems.append(f"{tokenizer.eos_token!r} both begins and ends a text")
    if problems:
        cause = "The model learns one and meets the other."
        return [Check(AREA, "special tokens", "fail", "; ".join(problems), cause, "repair the tokenizer")]
    if tokenizer.eos_token_id is None:
        cause = "No text ends, so no model learns to stop."
        return [Check(AREA, "special tokens", "warn", "there is none that ends a text", cause, "set eos_token")]
    return [Check(AREA, "special tokens", "ok", f"{tokenizer.eos_token!r} ends a text")]


def vocabulary(size: int, embedded: int) -> list[Check]:
    """Whether each of `size` tokens has a row in the embedding."""
    seen = f"{size:,} tokens, {embedded:,} rows in the embedding"
    if size > embedded:
        cause = (
            "A token without a row ends the run with an index error, or on a GPU with an assertion that names nothing."
        )
        return [
            Check(
                AREA, "vocabulary", "fail", seen, cause, "the tokenizer of this model, or model.resize_token_embeddings"
            )
        ]
    return [Check(AREA, "vocabulary", "ok", seen)]


def repeated(tokenizer: Any, encoded: Any, most: int = 1000) -> list[Check]:
    """Whether rows hold the same special token twice in a row: template and tokenizer both add it."""
    special = {i for i in tokenizer.all_special_ids if i is not None} - {tokenizer.pad_token_id}
    special |= {tokenizer.eos_token_id}
    looked, hit, token = min(len(encoded), most), 0, None
    for i in range(looked):
        ids = encoded[i]["input_ids"]
        twice = next((a for a, b in pairwise(ids) if a == b and a in special), None)
        if twice is not None:
            hit, token = hit + 1, twice
    if not hit:
        return []
    seen = f"{tokenizer.convert_ids_to_tokens(token)!r} stands twice in {hit} of {looked} rows"
    cause = "The model learns to write it twice; the template and the tokenizer, or the rows, each bring one."
    return [Check(AREA, "repeated token", "fail", seen, cause, "--chat-template, or take it out of the rows")]


def not_encoded(error: Exception) -> list[Check]:
    """Rows that could not be encoded at all."""
    if not isinstance(error, (ConfigError, DataError)):
        raise error
    option = "--chat-template with one that writes every turn" if "template" in str(error) else "--max-length"
    cause = "Nothing could be learnt from these rows."
    return [Check(AREA, "answers", "fail", " ".join(str(error).split()), cause, option)]


def lengths(report: EncodeReport, config: SftConfig) -> list[Check]:
    """How long rows are, how many were cut, and what is learnt of them."""
    checks = []
    mean = report.tokens / max(report.kept, 1)
    seen = f"{report.shortest} to {report.longest} tokens, {mean:.0f} on average"
    lost, cut = report.dropped + report.unlearnable, report.truncated
    if lost or cut:
        share = (lost + cut) / report.rows
        seen += f"; {lost} left out and {cut} cut of {report.rows} (--max-length {config.max_length})"
        status: Any = "fail" if share > 0.5 else "warn" if share > 0.05 else "ok"
        cause = "What is left out or cut is not learnt." if status != "ok" else ""
        longer = f"--max-length {report.longest}, or --truncation" if cause else ""
        checks.append(Check(AREA, "lengths", status, seen, cause, longer))
    else:
        checks.append(Check(AREA, "lengths", "ok", seen))
    learnt = report.learnt_tokens / max(report.tokens, 1)
    seen = f"{100 * learnt:.0f} % of {report.tokens:,} tokens are learnt"
    if config.loss == "answer" and learnt < 0.01:
        cause = "Almost nothing is learnt: the template may not mark answers where they stand."
        checks.append(Check(AREA, "answers", "fail", seen, cause, "--chat-template, or --loss all"))
    elif config.loss == "answer" and learnt > 0.98:
        cause = "Questions seem to be learnt as well."
        checks.append(Check(AREA, "answers", "warn", seen, cause, "--chat-template; shardproof data show"))
    else:
        checks.append(Check(AREA, "answers", "ok", seen))
    return checks


def worst(checks: Sequence[Check]) -> str:
    """The worst status among them."""
    return max((check.status for check in checks), key=("ok", "warn", "fail").index, default="ok")
