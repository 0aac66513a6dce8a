"""Promise: `shardproof plan` tells what a run will hold and move, before it runs, and on any machine."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from distributed.pool import Pool
from doctor.measured import held_and_moved
from shardproof.cli.main import main
from shardproof.doctor.config import PlanConfig
from shardproof.doctor.planning.plan import Candidate, Plan, loss_of, make_plan
from shardproof.doctor.planning.plan_view import in_words, show

SMALL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
QWEN_72B = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
MICRO, LENGTH = 2, 64


def config_in(folder: Path, **shape: object) -> Path:
    from transformers import Qwen2Config

    Qwen2Config(architectures=["Qwen2ForCausalLM"], **shape).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return config_in(tmp_path_factory.mktemp("small"), **SMALL)


def in_new_processes(world: int, *call: object, **options: object) -> list:
    ranks = Pool(world)
    try:
        return ranks.run(*call, **options)
    finally:
        ranks.close()


def compare(run, folder: Path, world: int, stages: Sequence[int], kinds: Sequence[Any] = ("no",), **options) -> None:
    """A plan of the CPU, where the engine keeps buffers and exchanges by hand, with what ranks allocate and send."""
    more = {"per_device_batch_size": [MICRO], "max_length": [LENGTH], "device": "cpu"} | options
    config = PlanConfig(model=str(folder), gpus=[world], **more)
    told = {"stage": ",".join(map(str, stages)), "gradient_checkpointing": list(kinds)}
    plan = make_plan(PlanConfig.model_validate(config.model_dump(exclude_unset=True) | told), *loss_of(config))
    for stage, again in product(stages, kinds):
        way = config.model_copy(update={"stage": str(stage), "gradient_checkpointing": [again]})
        measured = run(world, held_and_moved, way, timeout=300)[0]
        (found,) = (c for c in plan.candidates if (c.stage, in_words(c.checkpointing)) == (stage, str(again)))
        for kind, value in {**found.held, "peak": found.peak}.items():
            if kind in measured and kind != "gradients":  # at the peak there may be none yet
                assert value == pytest.approx(measured[kind], rel=0.05), f"{stage} {again}: {kind}"
        row = config.shard_group or world
        copies = world // row
        sent = measured["moved"] * (row - 1) / row + measured["exchanged"]
        if copies == 1:
            assert found.wire == pytest.approx(sent, rel=0.05), (stage, again)


@pytest.mark.parametrize(("worlds", "told"), [([2], ["fastest", "fastest"]), ([2, 4, 8], ["2: 50", "2: 70"])])
def test_each_table_tells_the_fastest_way_of_its_own_rows(worlds: list[int], told: list[str]) -> None:
    from rich.console import Console

    def way(world: int, length: int, speed: int) -> Candidate:
        return Candidate(2, world, False, 1, length, {"weights": 1e9}, 0.0, 0.0, 0.0, speed, 1.0)

    rooms = {"host": 0.0, "disk": 0.0}
    ways = [way(world, length, speed) for world in worlds for length, speed in ((64, 50), (256, 70))]
    console = Console(width=120, file=io.StringIO())
    config = PlanConfig(model="m", gpus=worlds, max_length=[64, 256])
    show(Plan("m", 1, 1, 72e9, rooms=rooms, candidates=ways), config, console)
    tables = console.file.getvalue().split("rows of ")[1:3]
    assert [word in table for word, table in zip(told, tables, strict=True)] == [True, True]


def test_it_is_within_5_percent_of_what_is_measured(run, small):
    compare(run, small, 1, [3], ["yes"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "kinds"),
    [(1, ["no"]), (2, ["no"]), (4, ["no"]), (1, ["selective"]), (2, ["yes", "selective", 3]), (4, ["yes"])],
    ids=["1", "2", "4", "1 selective", "2 again", "4 again"],
)
def test_so_it_is_at_every_stage_on_1_2_and_4_processes(small, world, kinds):
    compare(in_new_processes, small, world, [0, 1, 2, 3], kinds)


def step_at(folder: Path, depth: int, world: int, micro: int, stage: int, again: bool | int | str) -> float:
    """The peak of a step that was run at this size, with nothing derived from others."""
    from shardproof.doctor.planning.blocks import keep_blocks, repeated_blocks
    from shardproof.doctor.planning.checkpointing import checkpoint
    from shardproof.doctor.planning.imagine import Rank
    from shardproof.doctor.planning.ledger import HOME
    from shardproof.doctor.planning.stand_ins import fake_group
    from shardproof.doctor.planning.subject import meta_model

    config = PlanConfig(model=str(folder))
    model = meta_model(config)
    blocks = repeated_blocks(model)
    with fake_group(world):
        part = keep_blocks(model, blocks.name, depth)
        rank = Rank(part, config, stage, blocks)
        checkpoint(part, again, config)
        rank.step(micro, LENGTH)
        segments = rank.step(micro, LENGTH).segments
    return max(float(columns[:HOME].sum(axis=0).max()) for columns in segments.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "again"), [(1, False), (2, True), (2, 2), (3, True), pytest.param(2, "selective", marks=pytest.mark.slow)]
)
def test_what_follows_from_a_few_sizes_is_what_a_step_at_full_size_takes(small, stage, again):
    sizes = {"gpus": [2, 8, 256], "per_device_batch_size": [1, 2, 6], "max_length": [LENGTH], "stage": str(stage)}
    found = make_plan(PlanConfig(model=str(small), gradient_checkpointing=[again], **sizes))
    for c in found.candidates:
        if (c.world, c.micro) in [(8, 1), (8, 6), (256, 6)]:
            taken = step_at(small, SMALL["num_hidden_layers"], c.world, c.micro, stage, again)
            assert c.peak == pytest.approx(taken, rel=0.01), (c.world, c.micro)


def test_the_command_says_what_fits_and_what_is_fastest(small, capsys):
    rows = ["--per-device-batch-size", "2", "--max-length", "64", "--stage", "0,3", "--gpus", "8"]
    assert main(["plan", "--model", str(small / "config.json"), *rows, "--gpu-memory", "0.1"]) == 0
    text = " ".join(capsys.readouterr().out.split())  # lines are as wide as the terminal
    assert "too much" in text
    assert "Fastest that fits on 8: --stage 3 --per-device-batch-size 2" in text
    assert main(["plan", "--model", str(small), *rows, "--gpu-memory", "0.01", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {c["stage"] for c in found["candidates"]} == {0, 3}
    assert not any(c["fits"] for c in found["candidates"])


@pytest.mark.parametrize(
    "options", [["--stage", "4"], ["--gpus", "0"], ["--gpus", "two"], ["--model", "no/such/folder"]], ids=" ".join
)
def test_what_cannot_be_planned_is_refused(small, options, capsys):
    assert main(["plan", "--model", str(small), *options]) == 2
    assert options[0] in capsys.readouterr().err


OWN = """
import shardproof

@shardproof.register_model("own_kind")
def own(folder, **options):
    raise AssertionError("nothing is loaded")
"""


@pytest.mark.parametrize("plugins", [[], ["--external-plugins", "own.py"]], ids=["alone", "with its plugin"])
def test_a_model_of_a_plugin_is_refused_in_words_about_plan(plugins, tmp_path, monkeypatch, capsys):
    """Transformers says of it that a newer transformers may know it."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    Path("config.json").write_text(json.dumps({"model_type": "own_kind", "architectures": ["Own"]}))
    assert main(["plan", "--model", "config.json", *plugins]) == 2
    err = capsys.readouterr().err
    assert "own_kind" in err
    assert "plan supports transformers models" in err
    assert "shardproof doctor" in err
    assert "out of date" not in err


def test_a_known_kind_that_a_plugin_loads_is_not_planned_as_what_it_is_not(small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    kind = json.loads((small / "config.json").read_text())["model_type"]
    Path("own.py").write_text(OWN.replace("own_kind", kind))
    assert main(["plan", "--model", str(small), "--external-plugins", "own.py"]) == 2
    assert "plan supports transformers models" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_of_72_billion_parameters(tmp_path):
    """Every stage, on up to 1,024 processes."""
    folder = config_in(tmp_path, **QWEN_72B)
    found = make_plan(PlanConfig(model=str(folder)))
    assert found.parameters == 72_706_203_648
    assert {c.world for c in found.candidates} == {1 << n for n in range(11)}
    whole = 16 * found.parameters  # weights, gradients and two states, in fp32
    (alone,) = {round(c.peak / whole, 1) for c in found.candidates if (c.world, c.micro) == (1, 1) and c.checkpointing}
    assert alone == pytest.approx(1.1, abs=0.1)
    fits = {c.world for c in found.fitting if c.stage == 3}
    assert min(fits) in (16, 32)


@pytest.mark.slow
def test_copies_in_machines_are_chosen_where_the_link_between_is_slow(small):
    """Each holds what two ranks would, and sends no weights to the other machine."""
    more = {"stage": "3", "per_device_batch_size": [MICRO], "max_length": [LENGTH], "gradient_checkpointing": ["no"]}
    plan = make_plan(PlanConfig(model=str(small), gpus=[4], nodes=2, node_bandwidth=0.1, **more))
    pair = make_plan(PlanConfig(model=str(small), gpus=[2], **more)).candidates[0]
    one, copies = sorted(plan.candidates, key=lambda c: c.shard_group)
    assert (one.shard_group, copies.shard_group) == (0, 2)
    assert copies.held == pair.held
    assert one.peak < copies.peak
    assert plan.fastest(4) is copies
    gradients = 4 * plan.trainable
    assert copies.between_nodes == pytest.approx(gradients / 2, rel=0.05), "an all-reduce of a half over two"
    assert one.between_nodes > 1.3 * copies.between_nodes
    plan.limit = (one.peak + copies.peak) / 2
    assert plan.fastest(4) is one, "a copy in each does not fit"


def test_processes_that_cannot_be_spread_over_machines_are_refused(small, capsys):
    assert main(["plan", "--model", str(small), "--gpus", "6", "--nodes", "4"]) == 2
    assert "--gpus 6 cannot be divided evenly by --nodes 4" in capsys.readouterr().err
