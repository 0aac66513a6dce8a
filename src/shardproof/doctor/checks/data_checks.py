"""Checks of the rows and the tokenizer: over the whole set, before a model is loaded."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from shardproof.data.encoding.embed import MatchReport
from shardproof.data.encoding.labelled import LabelReport
from shardproof.data.encoding.report import EncodeReport
from shardproof.data.encoding.template import stops
from shardproof.data.forms.labels import SHOWN
from shardproof.data.forms.parts import has_files
from shardproof.doctor.checks.check import Check, option_in, some
from shardproof.errors import ConfigError, DataError
from shardproof.train.model.positions import check_positions
from shardproof.train.options.config import Batch, RunConfig, SftConfig
from shardproof.train.rows.lengths import lengths_of

FEW, MOST = 0.05, 0.9  # shares of odd rows: harmless below FEW, no point in a run above MOST
PADDED = 0.2  # share of padding from which advice is given
AREA, ROWS, HELD_OUT = "data", "rows", "rows to evaluate on"


def rows(found: Any, leave_out: bool, name: str = ROWS) -> list[Check]:
    """`found`: rows read without bad ones; `leave_out`: whether the run leaves bad ones out, too."""
    bad = [str(row) for row in found.skipped]
    return _bad(name, f"{len(found) + len(bad):,}", bad, leave_out)


def _bad(name: str, total: str, bad: Sequence[str], leave_out: bool) -> list[Check]:
    if not bad:
        return [Check(AREA, name, "ok", total)]
    seen = f"{len(bad):,} of {total}: {some(bad)}"
    if leave_out:
        return [Check(AREA, name, "warn", seen, "They are left out.")]
    cause = "The run would stop at these rows before it starts."
    return [Check(AREA, name, "fail", seen, cause, "fix them, or --bad-rows skip")]


def unread(error: DataError, name: str, option: str) -> Check:
    """The check for rows that could not be read at all; `option`: the option that names them."""
    cause = "There is nothing to train on." if name == ROWS else "The run stops before it starts."
    named = option_in(error, option)
    if named == "--columns" and "has no column" not in str(error):
        named = "fix the rows, or --columns if fields have other names"
    return Check(AREA, name, "fail", " ".join(str(error).split()), cause, named)


def with_all_files(rows: Iterable[Any], config: Any) -> Iterable[Any]:
    """The rows with all turns that have files: for embeddings and rerankers, including the documents."""
    from shardproof.data.encoding.embed import at_length

    return map(at_length, rows) if config.recipe in ("embedding", "reranker") else rows


def lost_files(found: Any, limits: Any) -> tuple[int, list[str]]:
    """The number of images, audio files and videos that rows name, and the rows with an unreadable one, with the
    reason."""
    from shardproof.data.forms.parts import Problem, parts_of
    from shardproof.data.media.reading import files_of

    count, lost = 0, []
    for row in found:
        named = sum(1 for _ in parts_of(row.messages))
        count += named
        try:
            if named:
                files_of(row, limits)
        except Problem as problem:
            lost.append(f"{row.where}: {problem}")
    return count, lost


def files(count: int, lost: Sequence[str], leave_out: bool) -> list[Check]:
    """Whether every file that rows name can be read. `count`: their number; `lost`: rows with unreadable ones."""
    if not lost:
        return [Check(AREA, "files", "ok", f"{count:,} can be read")] if count else []
    seen = f"{len(lost):,} of {count:,}: {some(lost)}"
    if leave_out:
        return [Check(AREA, "files", "warn", seen, "Their rows are left out.", "--media-root, or fix the rows")]
    cause = "The run would stop at these rows before it starts."
    option = "--media-root, or fix the rows; --bad-rows skip leaves them out"
    return [Check(AREA, "files", "fail", seen, cause, option)]


def refused(bad: Sequence[Any], lost: Sequence[str], total: int, leave_out: bool) -> list[Check]:
    """Rows that the model cannot take although their files can be read. `bad`: rows left out by encoding; `lost`: those
    already reported."""
    told = set(lost)
    others = [text for text in map(str, bad) if text not in told]
    return _bad("rows for the model", f"{total:,}", others, leave_out) if others else []


def special_tokens(tokenizer: Any) -> list[Check]:
    """Whether each special token exists once. Some tokenizers have several whitespace-only tokens, and in others one
    token begins and ends a text (GPT-2): neither is a problem."""
    numbers: dict[str, dict[int, bool]] = {}
    for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        numbers.setdefault(str(token).strip(), {})[number] = bool(getattr(token, "special", True))
    problems = [
        f"{text!r} is {len(ids)} tokens: {', '.join(map(str, sorted(ids)))}"
        for text, ids in numbers.items()
        if text and len(ids) > 1 and any(ids.values())
    ]
    if problems:
        cause = "The model learns one of them and sees the other."
        return [Check(AREA, "special tokens", "fail", "; ".join(problems), cause, "fix the tokenizer")]
    if tokenizer.eos_token_id is None:
        cause = "No text has an end token, so the model does not learn to stop."
        return [Check(AREA, "special tokens", "warn", "none of them ends a text", cause, "set eos_token")]
    begins = ", and begins it" if tokenizer.eos_token_id == tokenizer.bos_token_id else ""
    of_turns = [end for end in stops(tokenizer, None) if end != tokenizer.eos_token_id]
    turns = "".join(f", {tokenizer.convert_ids_to_tokens(end)!r} an answer" for end in of_turns)
    return [Check(AREA, "special tokens", "ok", f"{tokenizer.eos_token!r} ends a text{begins}{turns}")]


def vocabulary(size: int, embedded: int) -> list[Check]:
    """Whether each of `size` tokens has a row in the embedding."""
    seen = f"{size:,} tokens, {embedded:,} rows in the embedding"
    if size > embedded:
        cause = "A token without a row ends the run with an index error, or on a GPU with an unspecific assertion."
        return [
            Check(
                AREA, "vocabulary", "fail", seen, cause, "the tokenizer of this model, or model.resize_token_embeddings"
            )
        ]
    return [Check(AREA, "vocabulary", "ok", seen)]


def repeated(tokenizer: Any, encoded: Any, most: int = 1000) -> list[Check]:
    """Whether rows hold the same special token twice in succession, since template and tokenizer both add it."""
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
    seen = f"{tokenizer.convert_ids_to_tokens(token)!r} occurs twice in {hit} of {looked} rows"
    cause = "The model learns to write it twice; the template and the tokenizer, or the rows, each add one."
    status: Any = "fail" if hit > FEW * looked else "warn"
    return [Check(AREA, "repeated token", status, seen, cause, "--chat-template, or remove it from the rows")]


def not_encoded(error: Exception, name: str = "answers") -> list[Check]:
    """Rows that could not be encoded at all."""
    if not isinstance(error, (ConfigError, DataError)):
        raise error
    text = " ".join(str(error).split())
    cause, option = "Nothing could be learned from these rows.", option_in(error, "--max-length")
    if "chat template" in text:
        option = "--chat-template with a template that writes every turn"
    elif "file of kind" in text:
        cause, option = "The model cannot take these rows.", "a --model that takes such files, or rows without them"
    elif text.startswith("--"):
        cause = "The run would be refused."
    return [Check(AREA, name, "fail", text, cause, option)]


def longer_than(longest: int, cuts: Sequence[str], rows: Iterable[Any], cut_beside_files: bool = True) -> str:
    """What to do about rows that are too long: `longest` is the number of tokens of the longest. A row with files is
    never cut.

    Args:
        cuts: the options that cut rows. `cut_beside_files`: whether text rows are cut even if others have files.
    """
    if not any(has_files(row.messages) for row in rows):
        return ", or ".join([f"--max-length {longest}", *cuts])
    of_text = [f"{cut} (for rows without files)" for cut in cuts if cut_beside_files]
    return ", or ".join([f"--max-length {longest}", "smaller files (--max-pixels, --max-frames)", *of_text])


def lengths(report: EncodeReport, config: SftConfig, rows: Iterable[Any] = ()) -> list[Check]:
    """How long `rows` are, how many were cut, and how much of them is learned."""
    checks = []
    mean = report.tokens / max(report.texts if isinstance(report, MatchReport) else report.kept, 1)
    seen = f"{report.shortest} to {report.longest} tokens, {mean:.0f} on average"
    lost, cut = report.dropped + report.unlearnable, report.truncated
    if lost or cut:
        share = (lost + cut) / report.rows
        seen += f"; {lost} left out and {cut} cut of {report.rows} (--max-length {config.max_length})"
        status: Any = "fail" if share > MOST else "warn" if share > FEW else "ok"
        cause = "Rows left out and text cut off are not learned." if status != "ok" else ""
        cut_beside_files = not isinstance(report, (LabelReport, MatchReport))
        longer = longer_than(report.longest, ["--truncation"], rows, cut_beside_files) if cause else ""
        checks.append(Check(AREA, "lengths", status, seen, cause, longer))
    else:
        checks.append(Check(AREA, "lengths", "ok", seen))
    if isinstance(report, LabelReport):
        return [*checks, *_labels(report)]
    if isinstance(report, MatchReport):
        return checks
    learnt = report.learnt_tokens / max(report.tokens, 1)
    seen = f"{100 * learnt:.0f} % of {report.tokens:,} tokens are learned"
    answers = config.loss.startswith("answer")
    if answers and learnt < 0.01:
        cause = "Almost nothing is learned: the template may not mark the answers."
        checks.append(Check(AREA, "answers", "fail", seen, cause, "--chat-template, or --loss all"))
    elif answers and learnt > 0.98 and all(row.messages[0]["content"] for row in rows):
        cause = "Questions seem to be learned as well."
        checks.append(Check(AREA, "answers", "warn", seen, cause, "--chat-template; shardproof data show"))
    else:
        checks.append(Check(AREA, "answers", "ok", seen))
    return checks


def padding(config: RunConfig, batch: Batch, encoded: Any) -> list[Check]:
    """How much of a micro-batch is padding, with rows in random order; empty if there is none."""
    none = batch.micro == 1 or config.padding_free or config.group_by_length
    known = "input_ids" in getattr(getattr(encoded, "encoded", encoded), "column_names", ())
    if none or getattr(config, "packing", False) or not known:
        return []
    lengths = lengths_of(encoded)
    random.Random(config.seed).shuffle(lengths)
    batches = [lengths[at : at + batch.micro] for at in range(0, len(lengths), batch.micro)]
    share = 1 - sum(lengths) / max(1, sum(len(rows) * max(rows) for rows in batches))
    seen = f"{100 * share:.0f} % of a micro-batch of {batch.micro} rows"
    packs = "--packing or " if config.recipe == "sft" else ""
    advice = f"; {packs}--padding-free avoids computing it" if share > PADDED else ""
    return [Check(AREA, "padding", "ok", seen + advice)]


def _labels(report: LabelReport) -> list[Check]:
    """How many rows have each label; empty for a regression."""
    without = [name for name, count in report.labels.items() if not count]
    seen = some([f"{name} {count:,}" for name, count in report.labels.items()], SHOWN)
    if without:
        cause = f"No row teaches {some(without)}."
        return [
            Check(AREA, "labels", "warn", seen, cause, "add rows with them, or change --num-labels and --label-names")
        ]
    return [Check(AREA, "labels", "ok", seen)] if seen else []


def positions(config: RunConfig, source: str, encoded: Any) -> list[Check]:
    """Whether the model has a position for each token of the longest row; empty for models that compute positions."""
    try:
        check_positions(config, source, encoded)
    except ConfigError as error:
        cause = "The run would be refused: a token without a position ends it with an index error."
        return [Check(AREA, "positions", "fail", " ".join(str(error).split()), cause, option_in(error, "--max-length"))]
    return []


def worst(checks: Sequence[Check]) -> str:
    """The worst status among them."""
    return max((check.status for check in checks), key=("ok", "warn", "fail").index, default="ok")
