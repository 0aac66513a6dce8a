"""Promise: examples/plain_loop.py prints the same numbers on any number of processes, at every stage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FILE = Path(__file__).parents[2] / "examples" / "plain_loop.py"


def started(world: int, stage: int) -> subprocess.Popen[str]:
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    command = [sys.executable, *run, str(FILE), "--stage", str(stage)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.parametrize(
    "world, stage", [(2, 3), *(pytest.param(*at, marks=pytest.mark.slow) for at in ((2, 0), (4, 2)))]
)
def test_the_numbers_are_those_of_one_process(world: int, stage: int) -> None:
    runs = started(1, 0), started(world, stage)
    one, several = ([line.split() for line in run.communicate(timeout=300)[0].splitlines()] for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert len(one) == 20
    for here, there in zip(one, several, strict=True):  # step N  loss X  gradient norm Y
        assert float(there[3]) == pytest.approx(float(here[3]), abs=2e-4)
        assert float(there[6]) == pytest.approx(float(here[6]), abs=2e-3)
    assert float(one[-1][3]) < float(one[0][3])
