"""Rows of plain text for a model that knows conversations: as TRL has it, no chat template is put around them."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("shardproof")


def warn_of_plain(rows: Any, tokenizer: Any, columns: str) -> None:
    """Say that a `prompt` is plain text, where the model has a chat template; `columns`: what --columns says to make
    conversations of such rows. Of rows that are read while training nothing is said."""
    if not hasattr(rows, "__len__") or not len(rows) or not getattr(tokenizer, "chat_template", None):
        return
    first = rows[0]
    if first.kind == "text" and first.messages[0]["content"].strip():
        log.warning(
            "%s: 'prompt' is plain text, to which the chat template is not applied. If it is a question to a chat"
            " model, read it as a conversation: --columns %s",
            first.where,
            columns,
        )
