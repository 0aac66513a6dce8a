"""What a chat template writes after an answer, such as a newline. It is not part of the answer and is not learned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardproof.data.encoding.learnt import IGNORE
from shardproof.data.forms.parts import Problem
from shardproof.data.rows import Row
from shardproof.errors import ConfigError

if TYPE_CHECKING:
    from shardproof.data.encoding.encode import Encoder
    from shardproof.data.media.encode import MediaEncoder

BEHIND = "tokens behind the answer"  # a column of the rows in gkd


def tokens_behind(encoder: Encoder | MediaEncoder, turns: list[dict[str, Any]]) -> int:
    """How many tokens of a conversation follow its last answer; 0 if its template does not show that."""
    try:
        text, spans = encoder.text(Row(turns, "", 0))
    except (ConfigError, Problem):
        return 0
    ((_, labels, *_),) = encoder.labelled([(text, spans)])
    return next((behind for behind, label in enumerate(reversed(labels)) if label != IGNORE), 0)
