"""Checks of runs of `shardproof rlhf`: their rows, what is compared or rewarded, and what can be verified."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardproof.doctor.checks.check import Check, option_in, some
from shardproof.doctor.checks.data_checks import longer_than
from shardproof.errors import ConfigError, DataError
from shardproof.train.options.config import Batch
from shardproof.train.options.rlhf_config import PAIRED, REWARDED, RlhfConfig, draws_answers
from shardproof.train.rlhf.algorithms import ALGORITHMS
from shardproof.train.rlhf.rewards import check_rewarded

AREA = "data"
MOST = 1000  # rows to render
SHARE = 0.9  # share of rows left out or cut from which little is learned
TOGETHER = ("kto", "gkd")  # their loss spans the micro-batches of all ranks


def lengths(report: Any, config: RlhfConfig, rows: Iterable[Any] = ()) -> list[Check]:
    """How long `rows` are, and how many are left out or cut. `report`: a `PairReport`."""
    seen, lost = f"up to {report.longest:,} tokens", report.rows - report.kept
    if not lost and not report.cut:
        return [Check(AREA, "lengths", "ok", seen)]
    seen += f"; {lost} left out and {report.cut} cut of {report.rows:,} (--max-length {config.max_length})"
    status: Any = "fail" if lost + report.cut > SHARE * report.rows else "warn"
    cuts = [f"--truncation {end}" for end in ALGORITHMS[config.rlhf_type].cuts[:1]]
    option = longer_than(report.longest, cuts, rows, cut_beside_files=False)
    return [Check(AREA, "lengths", status, seen, "Rows left out and text cut off are not learned.", option)]


def answers(config: RlhfConfig, rows: Any, tokenizer: Any) -> list[Check]:
    """Whether the template writes the answers that are compared, or the start of an answer to be generated."""
    from shardproof.data.encoding.seen import Seen
    from shardproof.data.encoding.template import Template
    from shardproof.train.rlhf.rows import example_of

    looked = [row for row, _ in zip(rows, range(MOST), strict=False) if row.kind == "chat"]
    if not looked or config.rlhf_type == "gkd":
        return []
    template, lost = Template(tokenizer), []
    seen_by = Seen(template)
    for row in looked:
        example, conversations = example_of(config, row, seen_by)
        texts = [template.render(conversation) for conversation in conversations]
        question = template.render(example["prompt"], prompt=config.rlhf_type in REWARDED)
        if config.rlhf_type in PAIRED:
            same = texts[0] == texts[1]
        else:
            same = question == texts[0]
        if same:
            lost.append(row.where)
    option = "--chat-template with a template that writes every turn and the start of an answer"
    if not lost:
        return [Check(AREA, "answers", "ok", f"the template writes them, in {len(looked):,} rows")]
    if config.rlhf_type in REWARDED:
        seen = f"no answer is started in {len(lost)} of {len(looked):,} rows: {some(lost)}"
        return [Check(AREA, "answers", "warn", seen, "Nothing tells the model that its turn begins.", option)]
    what = "both answers give the same text" if config.rlhf_type in PAIRED else "the answer does not appear"
    seen = f"{what} in {len(lost)} of {len(looked):,} rows: {some(lost)}"
    status: Any = "fail" if len(lost) > len(looked) / 2 else "warn"
    return [Check(AREA, "answers", status, seen, "Nothing can be learned from these rows.", option)]


def rewarded(config: RlhfConfig, batch: Batch, rows: Any) -> list[Check]:
    """Whether there are enough rows, with the columns that rewards need."""
    try:
        check_rewarded(config, batch, rows)
    except (ConfigError, DataError) as error:
        text = " ".join(str(error).split())
        return [Check(AREA, "rewards", "fail", text, "The run would be refused.", option_in(error, "--dataset"))]
    return []


def labels(config: RlhfConfig, rows: Any) -> list[Check]:
    """Whether judged answers include both good and bad ones."""
    if config.rlhf_type != "kto":
        return []
    good = sum(bool(row.extra["label"]) for row in rows)
    seen = f"{good:,} good and {len(rows) - good:,} bad answers"
    if good and len(rows) - good:
        return [Check(AREA, "labels", "ok", seen)]
    return [Check(AREA, "labels", "warn", seen, "All answers are pushed in the same direction.", "rows of both kinds")]


def check_verifiable(config: RlhfConfig) -> None:
    """Raise ConfigError for a run that samples its answers: different numbers of processes sample different ones."""
    if draws_answers(config):
        option = (
            " Add --lmbda 0, without --seq-kd, to compare training on given answers."
            if config.rlhf_type == "gkd"
            else ""
        )
        raise ConfigError(
            f"--rlhf-type {config.rlhf_type} trains on answers that each rank samples, so a different number of "
            f"processes trains on different ones: there is nothing to compare.{option}\n"
            "'shardproof doctor' runs two steps of it; 'shardproof verify' takes dpo, kto, orpo, simpo, cpo and rm."
        )


def rewards(records: list[dict[str, Any]]) -> list[Check]:
    """Whether rewards varied in the trial. `records`: the records of its steps."""
    shown = [f"{r['reward']:.3g} (spread {r.get('reward_std') or 0.0:.2g})" for r in records if "reward" in r]
    if not shown:
        return []
    seen = ", ".join(shown)
    lengths = [r["completions/mean_length"] for r in records if "completions/mean_length" in r]
    seen += f"; answers of {max(lengths):.0f} tokens" if lengths else ""
    if not any(r.get("reward_std") or "teacher_kl" in r for r in records):  # a teacher judges tokens
        cause = "All answers to a prompt had the same reward, so nothing was learned in these steps."
        option = "--reward-funcs, --temperature, --num-generations, or a model that sometimes succeeds"
        return [Check("trial", "rewards", "warn", seen, cause, option)]
    return [Check("trial", "rewards", "ok", seen)]
