"""Weights for parts of answers: how much each token counts in the loss, depending on the text.

[Note: how an answer is weighed] Two kinds of patterns divide a text. A key is a plain text with two weights: its own,
and that of everything after it up to the next key. A regular expression has one, for what it matches. Everything else
has weight 1. Several sets are applied one after the other, each within the parts made by the previous one, and their
weights are multiplied. The end of a turn has weight 1, and a part with weight 0 is not learned. A token belongs to the
part that contains its first character. This matches ms-swift, which divides a text before tokenising it.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.data.encoding.template import Span
from shardproof.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import torch

WEIGHTS = "token_weights"  # the column with the weights of tokens
OPTION = "--token-weights"
Part = tuple[int, int, float]  # characters [start, end) of a text, and their weight

_STEPS = {"Action:": [2, 2], "Action Input:": [2, 2], "Thought:": [1, 1], "Final Answer:": [1, 1]}
_OBSERVED = {"Observation:": [2, 0]}
_CALLS = ("Name:", "Action:", "ACTION:", "Tool:", "Command", "Arguments:", "action input", "ACTION_INPUT:")

# The sets of ms-swift, under its names.
BUILT_IN: dict[str, Any] = {
    "react": _STEPS | _OBSERVED,
    "alpha_umi": _STEPS | _OBSERVED | {"Next:": [2, 2]},
    "hermes": {"<tool_call>.+?</tool_call>": 2},
    "qwen": {"✿FUNCTION✿:": [2, 2], "✿ARGS✿:": [2, 2], "✿RETURN✿:": [1, 1], "✿RESULT✿:": [2, 0]},
    "agentflan": {
        "response": {
            **{key: [1, 3] for key in (*_CALLS, "Action Input:")},
            **{key: [1, 1] for key in ("Thought:", "Final Answer:")},
            **_OBSERVED,
        },
        "query": {
            "What is the tool you want to use": 3,
            "What are the required parameter names": 3,
            "What is the value of": 3,
        },
    },
    "ignore_think_prefix": {"^<think>\n?": 0},
}


@dataclass(frozen=True)
class Weights:
    """One set of patterns.

    Attributes:
        patterns: regular expressions with one weight each, or keys with two each.
        questions: texts, each with the weight of the full answer to a question that contains it.
    """

    patterns: Mapping[str, Sequence[float]]
    questions: Mapping[str, float]

    @cached_property
    def _expressions(self) -> list[tuple[re.Pattern[str], Sequence[float]]]:
        each = ((re.escape(text) if len(weights) == 2 else text, weights) for text, weights in self.patterns.items())
        return [(re.compile(text, re.DOTALL), weights) for text, weights in each]

    def _found(self, text: str) -> Iterator[tuple[re.Match[str], Sequence[float]]]:
        """The matches of the patterns, in order; if several begin at one place, that of the first pattern."""
        ahead = [(first, one, w) for one, w in self._expressions if (first := _first(one, text, 0))]
        while ahead:
            found, _, weights = min(ahead, key=lambda each: each[0].start())
            yield found, weights
            at = found.end()
            others = ((next_ if next_.start() >= at else _first(one, text, at), one, w) for next_, one, w in ahead)
            ahead = [(next_, one, w) for next_, one, w in others if next_]

    def parts(self, text: str, question: str) -> Iterator[Part]:
        """The parts of an answer, in order and without gaps."""
        whole = next((weight for words, weight in self.questions.items() if words in question), None)
        if whole is not None:
            yield 0, len(text), whole
            return
        at, behind = 0, 1.0
        for found, (own, *rest) in self._found(text):
            yield at, found.start(), behind
            yield *found.span(), own
            at, behind = found.end(), rest[0] if rest else 1.0
        yield at, len(text), behind


def _first(expression: re.Pattern[str], text: str, at: int) -> re.Match[str] | None:
    """Its first non-empty match in a text from `at` on."""
    return next((found for found in expression.finditer(text, at) if found.group()), None)


def weights_named(names: Sequence[str]) -> list[Weights]:
    """The sets with these names: built-in ones, or JSON files.

    Raises:
        ConfigError: there is none with one of these names, or a file does not define weights.
    """
    return [_weights(_read(name), name) for name in names]


def contents(names: Sequence[str]) -> list[str]:
    """The names; those of files with a checksum of their contents."""
    sums = {name: zlib.crc32(json.dumps(_read(name)).encode()) for name in names if name not in BUILT_IN}
    return [f"{Path(name).name}:{sums[name]:08x}" if name in sums else name for name in names]


def _read(name: str) -> Any:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if not name.endswith(".json"):
        if name == "ignore_empty_think":
            raise ConfigError(f"{OPTION} {name}: use --loss answer+{name} or last_round+{name} for that.")
        hint = did_you_mean(name, list(BUILT_IN))
        raise ConfigError(f"{OPTION} {name}: must be one of {', '.join(BUILT_IN)}, or a .json file of your own.{hint}")
    try:
        return json.loads(Path(name).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not JSON: {error}"
        raise ConfigError(f"{OPTION} {name} cannot be read: {reason}.") from None


def _weights(said: Any, name: str) -> Weights:
    form = (
        f'{OPTION} {name}: it has to be an object of regular expressions and weights, {{"<tool_call>.+?</tool_call>":'
        ' 2}, or of keys and two weights, their own and that of all up to the next key, {"Action:": [2, 1]}.'
    )
    if not isinstance(said, dict) or not said:
        raise ConfigError(form)
    questions: Any = {}
    if set(said) <= {"response", "query"} and all(isinstance(part, dict) for part in said.values()):
        said, questions = said.get("response", {}), said.get("query", {})
    patterns = {text: weight if isinstance(weight, list) else [weight] for text, weight in said.items()}
    asked = {text: weight if isinstance(weight, list) else [weight] for text, weight in questions.items()}
    for text, weights in [*patterns.items(), *asked.items()]:
        if not text or not all(_is_weight(weight) for weight in weights) or len(weights) not in (1, 2):
            raise ConfigError(f"{form}\nFor {text!r} it has {json.dumps(weights)}; weights must be 0 or more.")
    if len({len(weights) for weights in patterns.values()}) > 1 or any(len(weights) > 1 for weights in asked.values()):
        raise ConfigError(f"{form}\nThis one mixes them. To have both, name two files.")
    made = Weights(
        {text: [*map(float, weights)] for text, weights in patterns.items()},
        {text: float(weights[0]) for text, weights in asked.items()},
    )
    for text in patterns if any(len(weights) == 1 for weights in patterns.values()) else ():
        try:
            re.compile(text)
        except re.error as error:
            raise ConfigError(f"{OPTION} {name}: {text!r} is not a regular expression: {error}.") from None
    return made


def _is_weight(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def weighed(sets: Sequence[Weights], text: str, question: str) -> list[Part]:
    """The parts of an answer according to all these sets, see [Note: how an answer is weighed]; none is empty."""
    parts: list[Part] = [(0, len(text), 1.0)]
    for one in sets:
        parts = [
            (start + a, start + b, weight * more)
            for start, end, weight in parts
            for a, b, more in one.parts(text[start:end], question)
        ]
    return [part for part in parts if part[0] < part[1]]


def parts_of_text(sets: Sequence[Weights], text: str, said: Span, question: str) -> list[Part]:
    """The parts of an answer at the places `said` of a text."""
    return [(said[0] + a, said[0] + b, weight) for a, b, weight in weighed(sets, text[slice(*said)], question)]


def laid_over(spans: Sequence[Span], parts: Sequence[Part]) -> list[Part]:
    """The spans with the weights of these parts of them, in the order of the text; text outside all parts has weight 1,
    and text with weight 0 is not learned."""
    found: list[Part] = []
    for start, end in spans:
        at = start
        for a, b, weight in parts:
            a, b = max(a, at), min(b, end)
            if a < b:
                found += [(at, a, 1.0), (a, b, weight)]
                at = b
        found.append((at, end, 1.0))
    return [part for part in found if part[0] < part[1]]


def batch_of_weights(rows: Sequence[Mapping[str, Any]], labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weights of tokens, float32 of the same shape as `labels` (rows, length), under the column's name; nothing if
    no row has any."""
    import torch

    if not any(WEIGHTS in row for row in rows):
        return {}
    weights = torch.ones(labels.shape)
    for i, row in enumerate(rows):
        if WEIGHTS in row:
            weights[i, : len(row[WEIGHTS])] = torch.as_tensor(row[WEIGHTS])
    return {WEIGHTS: weights}
