"""Hosts for the tests that want them, and the small model and rows of the tests of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.train.conftest import rows, tiny  # noqa: F401  (fixtures)

from machines.hosts import Hosts, reason
from machines.launch import Launch


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    """`hosts(2)`: so many hosts, until the test ends."""
    if missing := reason():
        pytest.skip(f"no hosts of namespaces here: {missing}")
    with ExitStack() as stack:
        yield lambda count, **options: stack.enter_context(Hosts(count, tmp_path, **options))


@pytest.fixture
def sft(tiny: Path, rows: Path, tmp_path: Path) -> Launch:  # noqa: F811
    return Launch(tiny, rows, tmp_path)
