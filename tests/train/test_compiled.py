"""--compile: the blocks of a real model, compiled each by itself, give what they give uncompiled."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

from distributed.harness import Case, Sharded, compare, train
from shardproof.cli import training
from shardproof.errors import ConfigError
from shardproof.integrations.prepared import compile_units
from shardproof.models.checkpointing import enable_checkpointing
from shardproof.train.model import compiled
from shardproof.train.model.compiled import check_compiler
from shardproof.train.options.batch import Batch
from shardproof.train.options.config import SftConfig
from shardproof.train.watching.timeline import Timeline
from zero.language_models import texts, tiny, train_step

pytestmark = pytest.mark.slow

BUILD = functools.partial(tiny, "Qwen3", num_hidden_layers=12, use_cache=False)


def case(backend: str | None, checkpointed: bool = False) -> Case:
    def build() -> torch.nn.Module:
        model = BUILD()
        if checkpointed:
            enable_checkpointing(model, False)
        return model.train()

    def after(env: object, model: torch.nn.Module) -> None:
        if backend is not None:
            assert compile_units(model, backend=backend) == 12

    return Case(build, train_step, texts, sharded=after, steps=2)


def same(backend: str, stage: int, checkpointed: bool = False) -> int:
    """Returns how many graphs were compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compare(train(case(None), Sharded(stage)), train(case(backend, checkpointed), Sharded(stage)), tolerance=1e-5)
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_two_ranks_with_compiled_blocks(run2):
    graphs = run2(same, "aot_eager", 3, timeout=180)
    assert max(graphs) <= 2  # twelve blocks share what is compiled


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_with_real_kernels(run2, stage, checkpointed):
    run2(same, "inductor", stage, checkpointed, timeout=400)


class Marks:
    """A clock that knows who looks at it: Dynamo would write down a constant, or an event of no stream."""

    def __init__(self) -> None:
        self.traced: list[bool] = []

    def mark(self) -> float:
        self.traced.append(torch.compiler.is_compiling())
        return float(len(self.traced))

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def timed(folder: Path) -> tuple[list[bool], dict[str, list[float]]]:
    """The timeline of a step with compiled blocks: for each mark whether it was traced, and when forwards began."""
    torch._dynamo.reset()
    model = BUILD().train()
    Sharded(3).shard(model)
    compile_units(model, backend="eager")
    optimizer, marks = torch.optim.SGD(model.parameters(), lr=0.1), Marks()
    for step in range(2):
        timeline = Timeline(model.__dict__["_shardproof"], optimizer)
        timeline.clock = marks
        timeline.begin(step)
        train_step(Sharded(3), model, texts(step, 2))
        timeline.end(folder / "timeline.json")
    began: dict[str, list[float]] = {}
    for kind, unit, begin, _ in json.loads((folder / "timeline.json").read_text())["computed"]:
        began.setdefault(kind, []).append(begin) if unit else None
    return marks.traced, began


def test_the_timeline_of_a_compiled_step_has_its_moments(run, tmp_path):
    ((traced, began),) = run(1, timed, tmp_path, timeout=180)
    assert not any(traced)
    assert len(set(began["forward"])) >= 12
    assert len(set(began["backward"])) >= 12


def test_a_model_without_blocks_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    Sharded(3).shard(model)
    with pytest.raises(ConfigError, match="no repeated blocks"):
        compile_units(model)


def test_no_compiler_is_told_before_anything_else(monkeypatch):
    check_compiler()
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="needs a C\\+\\+ compiler"):
        check_compiler()


@pytest.mark.parametrize("wanted", [False, True])
def test_a_run_that_will_be_silent_for_minutes_says_so_before(capsys, wanted):
    config = SftConfig(model="tiny", dataset=["rows.jsonl"], compile=wanted)
    training._say_plan(config, Batch(micro=1, accumulation=1, world_size=1), [], None)
    assert ("in the first steps: minutes without output" in capsys.readouterr().out) is wanted


@pytest.mark.slow
def test_a_run_has_the_losses_of_the_one_without(commands, sft, rows):
    more = ["--val-dataset", str(rows), "--eval-steps", "3", "--max-steps", "4"]
    done = commands(
        [
            ("plain", sft("--nproc", "1", "--stage", "0", *more)),
            ("compiled", sft("--nproc", "2", "--stage", "3", "--compile", *more)),
        ]
    )
    assert done["compiled"].code == 0, done["compiled"].output
    for key in ("loss", "eval_loss"):
        assert done["compiled"].series(key) == pytest.approx(done["plain"].series(key), abs=1e-5)
