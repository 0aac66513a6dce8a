"""The lengths of rows, for batches of rows of similar length."""

from __future__ import annotations

from typing import Any

from shardproof.errors import ConfigError

NO_TOKENS = ("token_type_ids", "position_ids")


def lengths_of(rows: Any) -> list[int]:
    """The number of tokens in each row, summed over its texts if it has several (a prompt, two answers).

    Args:
        rows: a dataset with columns of token ids, or `MediaRows`.

    Raises:
        ConfigError: they have no token ids yet.
    """
    import pyarrow.compute

    encoded = getattr(rows, "encoded", rows)
    names = [name for name in encoded.column_names if name.endswith("_ids") and not name.endswith(NO_TOKENS)]
    if not names:
        raise ConfigError(
            "--group-by-length: the number of tokens in these rows is known only during training. Leave it out."
        )
    table = encoded.with_format("arrow")
    lengths = [pyarrow.compute.list_value_length(table[name][:]).to_pylist() for name in names]
    return [sum(row) for row in zip(*lengths, strict=True)]
