"""Plain-text rows for a chat model: as in TRL, no chat template is applied to them."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("shardproof")


def warn_of_plain(rows: Any, tokenizer: Any, columns: str) -> None:
    """Warn if `prompt` is plain text but the model has a chat template; `columns`: the --columns that would turn such
    rows into conversations. Rows read during training are not checked."""
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
