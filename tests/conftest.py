"""Fixtures for all tests: the shared pools of ranks, and `slow` tests that run only when asked for."""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests measure numbers, and ranks share the cores
sys.path.insert(0, str(Path(__file__).parent))  # `distributed.pool` and its neighbours, here and in the ranks

import pytest

import aside
from distributed.pool import Pools

SLOW_LIMIT = 3600  # seconds; for other tests pyproject.toml says it
# Every thirteenth case of a sampled test runs. Stages come in fours, so each has its turn; of four cases, stage 3.
SAMPLED, FIRST = 13, 3


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: runs only with --slow")
    # A shell has what it starts in the background ignore Ctrl-C, and so would the runs that tests interrupt.
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.timeout(SLOW_LIMIT), append=False)
        return
    skip = pytest.mark.skip(reason="slow: runs with --slow")
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for sampled in cases.values():
        kept = sampled[min(FIRST, len(sampled) - 1) :: SAMPLED]
        for item in sampled:
            if item not in kept:
                item.add_marker(pytest.mark.slow)
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(skip)


@pytest.fixture(scope="module")
def bitsandbytes() -> Iterator[None]:
    """That package, for this process and those that it starts."""
    if aside.bitsandbytes() is None:
        pytest.skip("pip install 'shardproof[eightbit]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), aside.FOLDER])))
        yield


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """Commands that a test calls in its own process set variables for libraries, and how much the engine says: no
    later test may see them."""
    before, level = dict(os.environ), logging.getLogger("shardproof.zero").level
    yield
    logging.getLogger("shardproof.zero").setLevel(level)
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def one_precision_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that a test calls compute in fp32 where they say nothing, also on a machine with a GPU."""
    monkeypatch.setattr("shardproof.cli.precision.NODES", ())


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


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_models("qwen2_5_omni")`: the folder of a small model that sees, hears, or both."""

    @functools.cache
    def folder(kind: str) -> Path:
        from models import tiny_folders
        from shardproof.models import tiny_media

        ours = {
            tiny_media.OMNI: tiny_media.build_tiny_omni,
            tiny_media.QWEN_VL: tiny_media.build_tiny_qwen_vl,
            tiny_media.MINICPM_V: tiny_media.build_tiny_minicpm_v,
        }
        made = tmp_path_factory.mktemp("models") / kind
        return ours[kind](made, tiny_folders.TEXTS) if kind in ours else tiny_folders.build(kind, made)

    return folder


@pytest.fixture(scope="session")
def files(media_files: Path) -> Path:
    """As `media_files`; where fixtures of a folder have this name it is another."""
    return media_files


@pytest.fixture(scope="session")
def media_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small pictures (a.png, b.png), sounds (a.wav, long.wav), a video (a.gif) and a broken picture."""
    import numpy as np
    import soundfile
    from PIL import Image

    folder = tmp_path_factory.mktemp("files")
    chance = np.random.default_rng(0)
    pictures = [Image.fromarray(chance.integers(0, 255, (16, 24, 3), dtype=np.uint8)) for _ in range(4)]
    pictures[0].save(folder / "a.png")
    pictures[1].resize((40, 16)).save(folder / "b.png")
    pictures[0].save(folder / "a.gif", save_all=True, append_images=pictures[1:], duration=100)
    (folder / "broken.png").write_bytes((folder / "a.png").read_bytes()[:200])
    soundfile.write(folder / "a.wav", 0.1 * chance.standard_normal(4000), 8000)
    soundfile.write(folder / "long.wav", np.zeros(8000 * 90), 8000)
    return folder
