"""Fixtures for all tests: the shared pools of ranks, and `slow` tests that run only when asked for."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests measure numbers, and ranks share the cores
sys.path.insert(0, str(Path(__file__).parent))  # `distributed.pool` and its neighbours, here and in the ranks

import pytest

from distributed.pool import Pools


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: runs only with --slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow: runs with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture
def run(pools: Pools) -> Callable[..., list[Any]]:
    """`run(world, fn, *args)`: what `fn` returned on each of `world` ranks."""
    return pools.run


@pytest.fixture
def run2(pools: Pools) -> Callable[..., list[Any]]:
    return functools.partial(pools.run, 2)


@pytest.fixture
def run4(pools: Pools) -> Callable[..., list[Any]]:
    return functools.partial(pools.run, 4)
