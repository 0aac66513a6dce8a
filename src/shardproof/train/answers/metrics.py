"""Scores of an answer against the right one; an evaluation reports their means over rows."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardproof.errors import ConfigError
from shardproof.models.families.family import TALKER
from shardproof.plugins import Plugins
from shardproof.train.answers.numbers import number_of
from shardproof.train.options.config import SftConfig
from shardproof.train.options.option import flag
from shardproof.train.plugin_calls import own_answer_metric

Metric = Callable[[str, str], float]

DEFAULT = "exact_match"
OF_SACREBLEU = "bleu", "chrf"
_WIDE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")  # scripts without spaces between words
_WORDS = re.compile(rf"{_WIDE.pattern}|[^\W{_WIDE.pattern[1:-1]}]+")


def exact_match(answer: str, right: str) -> float:
    """1 for the same text, otherwise 0. Surrounding white space is ignored."""
    return float(answer.strip() == right.strip())


def accuracy(answer: str, right: str) -> float:
    """1 if the answer ends with the same number as the right one, otherwise 0, like the reward in rlhf."""
    number = number_of(right)
    return float(number is not None and number_of(answer) == number)


def rouge_l(answer: str, right: str) -> float:
    """ROUGE-L, 0 to 1: the share of words that both have in the same order (F1). Case is ignored; in Chinese and
    Japanese, each character is a word."""
    said, wanted = (_WORDS.findall(text.lower()) for text in (answer, right))
    longest = [0] * (len(wanted) + 1)  # common subsequence with each prefix of `wanted`
    for word in said:
        before = longest.copy()
        for i, other in enumerate(wanted, 1):
            longest[i] = before[i - 1] + 1 if word == other else max(before[i], longest[i - 1])
    return 2 * longest[-1] / max(len(said) + len(wanted), 1)


def bleu(answer: str, right: str) -> float:
    """sacrebleu's sentence BLEU, 0 to 100; by character for Chinese and Japanese."""
    import sacrebleu

    tokenize = "zh" if _WIDE.search(right) else "13a"
    return float(sacrebleu.sentence_bleu(answer, [right], tokenize=tokenize).score)


def chrf(answer: str, right: str) -> float:
    """sacrebleu's sentence chrF, 0 to 100: the overlap in character n-grams."""
    import sacrebleu

    return float(sacrebleu.sentence_chrf(answer, [right]).score)


BUILT_IN: dict[str, Metric] = {
    DEFAULT: exact_match,
    "accuracy": accuracy,
    "rouge_l": rouge_l,
    "bleu": bleu,
    "chrf": chrf,
}


def judged(worth: Mapping[str, Metric], answer: str, right: str) -> dict[str, float]:
    """The score of an answer by each metric."""
    return {name: round(metric(answer, right), 6) for name, metric in worth.items()}


def check_names(names: Sequence[str]) -> None:
    """Raise ConfigError for a metric whose package is not installed."""
    needs = next((name for name in names if name in OF_SACREBLEU), None)
    if needs and importlib.util.find_spec("sacrebleu") is None:
        raise ConfigError(f"--answer-metrics {needs} needs sacrebleu: pip install 'shardproof[answers]'")


def metrics_of(config: SftConfig) -> Sequence[str]:
    """The names of the metrics for answers in evaluations."""
    return (config.answer_metrics or [DEFAULT]) if config.predict_with_generate else ()


def check_answering(config: SftConfig) -> None:
    """Raise ConfigError for options that do not work with generated answers in evaluations, or that need them."""
    if not config.predict_with_generate:
        for name in ("answer_metrics", "max_new_tokens", "stop_words"):
            if getattr(config, name) != SftConfig.model_fields[name].default:
                raise ConfigError(f"{flag(name)} applies to answers in evaluations: add --predict-with-generate.")
        return
    if not config.holds_out:
        raise ConfigError("--predict-with-generate needs rows to evaluate on: add --val-dataset or --val-split.")
    against = {
        "--loss all": (config.loss == "all", "answers are identified by the tokens that are learned"),
        "--sequence-parallel": (config.sequence_parallel > 1, "each process reads a part of a row"),
        f"--train-parts {TALKER}": (TALKER in (config.train_parts or ()), "only text is scored"),
    }
    for other, (given, why) in against.items():
        if given:
            raise ConfigError(f"--predict-with-generate and {other}: {why}. Leave one of them out.")
    check_names(config.answer_metrics)
    if taken := next((name for name in metrics_of(config) if name in ("loss", *config.metrics)), None):
        raise ConfigError(f"--answer-metrics {taken}: evaluations already report a metric of that name. Rename yours.")


def answer_metrics(names: Sequence[str], plugins: Plugins) -> dict[str, Metric]:
    """The metrics by name; the user's own are checked at every call.

    Raises:
        ConfigError: there is no metric of this name.
    """
    found: dict[str, Any] = {name: plugins.find("answer metric", name) for name in names}
    return {name: BUILT_IN[name] if own is None else own_answer_metric(name, own) for name, own in found.items()}
