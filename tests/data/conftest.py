"""Real things to test with: files as users write them, and a tokenizer trained on the embedded rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardproof.data.sources.stdlib import stdlib_rows
from shardproof.models.tiny import train_tokenizer


@pytest.fixture(scope="session")
def trained() -> Any:
    return train_tokenizer([row["response"] for row in stdlib_rows(1000)])


@pytest.fixture
def tokenizer(trained: Any) -> Any:
    """A tokenizer of its own for each test: tests change templates and special tokens."""
    return type(trained)(
        tokenizer_object=trained.backend_tokenizer.from_str(trained.backend_tokenizer.to_str()),
        eos_token=trained.eos_token,
        pad_token=trained.pad_token,
        chat_template=trained.chat_template,
    )


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write a file and get its name. Lists become JSON Lines, or whatever the extension asks for."""

    def _write(name: str, content: str | bytes | list[Any]) -> str:
        path = tmp_path / name
        if isinstance(content, list):
            if path.suffix == ".json":
                content = json.dumps(content, indent=1)
            else:
                content = "".join(json.dumps(row) + "\n" for row in content)
        if isinstance(content, str):
            content = content.encode()
        path.write_bytes(content)
        return str(path)

    return _write
