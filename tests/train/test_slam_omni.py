"""The example of a model of one's own: its page says what works, and it trains alike at every stage."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "examples" / "slam_omni" / "README.md"
KINDS = {"": [], "c": ["--gradient-checkpointing"], "r": ["--gradient-checkpointing", "--checkpointing-reentrant"]}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The commands of the page, with a folder of the test's in place of `runs`, once the first has been run."""
    (block,) = re.findall(r"```console\n(.*?)```", README.read_text(), re.DOTALL)
    runs = str(tmp_path_factory.mktemp("slam"))
    lines = [line[2:] for line in block.replace("\\\n", " ").splitlines() if line.startswith("$ ")]
    make, *commands = [
        [re.sub("^runs", runs, word).replace("examples/", f"{ROOT}/examples/") for word in shlex.split(line)]
        for line in lines
    ]
    assert make[0] == "python"
    subprocess.run([sys.executable, *make[1:]], check=True, timeout=300)
    return [words[1:] for words in commands]


def short(argv: list[str], nproc: int, stage: int, kind: str) -> list[str]:
    """The page's training for 4 steps, at another stage, with another kind of checkpointing."""
    plain = [word for word in argv if word not in KINDS["r"]]
    return [
        *plain,
        "--nproc",
        str(nproc),
        "--stage",
        str(stage),
        "--max-steps",
        "4",
        "--output-dir",
        "OUT",
        *KINDS[kind],
    ]


def check(commands, argv: list[str], plan: list[tuple[int, int, str]]) -> None:
    done = commands([(f"n{n}s{stage}{kind}", short(argv, n, stage, kind)) for n, stage, kind in plan])
    assert all(run.code == 0 for run in done.values()), [run.output for run in done.values() if run.code]
    one, *others = done.values()
    assert one.series("loss")[-1] < one.series("loss")[0] - 0.1
    for run in others:
        assert run.series("loss") == pytest.approx(one.series("loss"), abs=1e-5), run.folder
        assert run.series("eval_loss") == pytest.approx(one.series("eval_loss"), abs=1e-5), run.folder
        assert run.series("eval_codes") == pytest.approx(one.series("eval_codes"), abs=0.01), run.folder


def test_two_processes_at_stage_3_print_the_losses_of_one(commands, page) -> None:
    check(commands, page[0], [(1, 0, ""), (2, 3, "r")])


def test_half_of_the_micro_batches_are_without_sound(page) -> None:
    file = Path(page[0][page[0].index("--dataset") + 1])
    spoken = ["codes" in json.loads(line) for line in file.read_text().splitlines()]
    assert 0.4 < sum(spoken) / len(spoken) < 0.6


@pytest.mark.slow
def test_so_they_do_on_one_process_and_with_each_kind_of_checkpointing(commands, page) -> None:
    check(commands, page[0], [(n, stage, kind) for n in (1, 2) for stage in range(4) for kind in KINDS])


@pytest.mark.slow
def test_the_page_says_what_comes_out(commands, page) -> None:
    train, ask = page
    done = commands([("trained", train), ("asked", ask)])
    assert done["trained"].code == done["asked"].code == 0, done["trained"].output + done["asked"].output
    assert "five<|audio_50|><|audio_25|><|audio_0|>" in done["asked"].output
    folder = Path(train[train.index("--output-dir") + 1])
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["eval_codes"] > 0.95
