"""From a query and candidate documents, both with images, audio and video, to prompts that a causal language model
answers with one word. See [Note: pairs in templates] in judged.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardproof.data.encoding.judged import turns_of_pair
from shardproof.data.encoding.rank import relevances
from shardproof.data.encoding.template import Template
from shardproof.data.forms.formats import SYSTEM, with_system
from shardproof.data.forms.matches import NEGATIVE, POSITIVE, turns_of_found
from shardproof.data.forms.texts import check_texts
from shardproof.data.media.embed import MediaMatchCollator, MediaMatchEncoder, Read
from shardproof.data.rows import Row


def written(tokenizer: Any, system: str | None, query: str, document: str) -> str:
    """Like `judged.prompt`, for a template that may need its texts as parts."""
    return Template(tokenizer).render(turns_of_pair(system, query, document), prompt=True)


class MediaJudgedEncoder(MediaMatchEncoder):
    """Rows to the token ids of a prompt for each pair, including those of files, and to batches."""

    def conversations(self, row: Row) -> list[Row]:
        """Each pair of a row, as a row of its own."""
        check_texts(row.messages)
        turns = with_system(row.messages, self._before_queries)
        system = turns[0]["content"] if turns[0]["role"] in SYSTEM else None
        query = joined([turn for turn in turns if turn["role"] not in SYSTEM])
        found = (joined(turns_of_found(one)) for one in (*row.extra[POSITIVE], *row.extra[NEGATIVE]))
        return [Row(turns_of_pair(system, query, document), row.source, row.line) for document in found]

    def columns(self, row: Row, made: Sequence[Any], *_: Any) -> dict[str, Any]:
        """`labels`, 1 for a positive and 0 for a negative."""
        return {"labels": relevances(row)}


class MediaPairCollator(MediaMatchCollator):
    """Batches of rows with files, like those of `collate_pairs`, with the tensors of the files."""

    def laid_out(self, each: Sequence[Sequence[Read]]) -> list[Read]:
        return [pair for pairs in each for pair in pairs]

    def labels(self, rows: Sequence[Mapping[str, Any]], laid_out: Sequence[Read], mask: Any) -> dict[str, Any]:
        import torch

        relevant = torch.tensor([float(label) for row in rows for label in row["labels"]])
        return {"relevant": relevant, "counts": [len(row["labels"]) for row in rows]}


def joined(turns: Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """The contents of turns, one per line: a text, or parts if any has a file."""
    if all(isinstance(turn["content"], str) for turn in turns):
        return "\n".join(turn["content"] for turn in turns)
    parts: list[dict[str, Any]] = []
    for i, turn in enumerate(turns):
        content = turn["content"]
        line = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts += [{"type": "text", "text": "\n"}, *line] if i else line
    return parts
