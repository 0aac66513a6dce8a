"""A run that was ended goes on where its newest checkpoint is: the same rows, the same losses, without a human."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.train.conftest import Run, last_of_each

from shardproof.errors import ConfigError

# A loss that writes down what is learned, by rank.
SEEN = """
import json, pathlib, torch, shardproof
from shardproof.train.losses.tokens import token_mean

@shardproof.register_loss("seen")
def seen(outputs, labels, num_items_in_batch):
    rank = torch.distributed.get_rank()
    rows = [row[row != -100].tolist() for row in labels]
    if torch.is_grad_enabled():
        with pathlib.Path(__file__).with_name(f"rank{rank}.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + chr(10) for row in rows if row)
    return token_mean(outputs, labels, num_items_in_batch)
"""


# A callback that asks the run to end in a step, once.
ENDING = """
import os, pathlib, signal, transformers, shardproof

@shardproof.register_callback("ending")
class Ending(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        once = pathlib.Path(__file__).with_name("once")
        if state.global_step == 1 and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGINT)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """`packed("whole")`: options of two epochs of packed rows; what is learned is written down in `seen("whole")`."""
    base = tmp_path_factory.mktemp("seen")

    def options(name: str) -> list[str]:
        (base / name).mkdir()
        (base / name / "plugin.py").write_text(SEEN)
        fixed = "--nproc 2 --packing --max-length 64 --max-steps none --epochs 2 --global-batch-size 2 --save-steps 2"
        return [*fixed.split(), "--external-plugins", str(base / name / "plugin.py"), "--loss", "seen"]

    return options


def seen(run: Run) -> list[list[str]]:
    """What each rank has learned from, in its order."""
    options = yaml.safe_load((run.folder / "config.yaml").read_text())
    folder = Path(options["external_plugins"][0]).parent
    return [(folder / f"rank{rank}.jsonl").read_text().splitlines() for rank in range(2)]


@pytest.fixture(scope="module")
def whole(commands, sft, rows: Path, packed: Callable[[str], list[str]]):
    """Uninterrupted runs of 6 steps (an epoch has 3) that save at steps 2, 4 and 6; what they leave behind."""
    more = "--save-steps 2 --logging-steps 3 --max-steps 6 --lr-scheduler cosine".split()
    noisy = ["--tuner", "lora", "--lora-dropout", "0.3", "--target-modules", "q_proj", "v_proj"]
    return commands(
        [
            ("full", sft("--nproc", "2", "--stage", "3", *more)),
            ("lora", sft("--nproc", "1", "--stage", "2", "--save-steps", "2", *noisy)),
        ]
    )


@pytest.fixture(scope="module")
def others(commands, sft, packed: Callable[[str], list[str]]):
    """The same in fp16 with checkpoints of the weights alone, and of packed rows."""
    light = "--save-steps 2 --save-total-limit 1 --save-only-model".split()
    return commands(
        [
            ("half", sft("--nproc", "2", "--stage", "3", "--precision", "fp16", *light)),
            ("half alone", sft("--nproc", "1", "--stage", "0", "--precision", "fp16")),
            ("packed", sft(*packed("whole"))),
        ]
    )


@pytest.fixture(scope="module")
def resumed(whole, commands, sft, rows: Path, tmp_path_factory: pytest.TempPathFactory):
    """Runs that go on from checkpoints of the uninterrupted ones."""
    base = tmp_path_factory.mktemp("broken")
    full, lora = whole["full"], whole["lora"]
    assert full.code == 0, full.output
    assert lora.code == 0, lora.output
    for name in ("killed", "damaged"):
        shutil.copytree(full.folder, base / name)
        shutil.rmtree(base / name / "model")
        shutil.rmtree(base / name / "checkpoint-6")
    (base / "killed" / "checkpoint-7.unfinished").mkdir()
    shutil.copytree(full.folder, base / "ended")
    for damaged in (base / "damaged" / "checkpoint-4", base / "ended" / "checkpoint-6"):
        file = next(damaged.glob("*.distcp"))
        data = bytearray(file.read_bytes())
        data[-5000] ^= 1
        file.write_bytes(data)
    shutil.copytree(base / "damaged" / "checkpoint-2", base / "damaged" / "checkpoint-9")
    file = next((base / "damaged" / "checkpoint-9").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])

    def on(folder: Path, *argv: str) -> list[str]:
        return [str(folder) if arg == "OUT" else arg for arg in sft(*argv)]

    more = "--save-steps 2 --logging-steps 3 --max-steps 6 --lr-scheduler cosine".split()
    noisy = ["--tuner", "lora", "--lora-dropout", "0.3", "--target-modules", "q_proj", "v_proj"]
    two, step2 = ["--nproc", "2", "--stage", "3"], str(full.folder / "checkpoint-2")
    lines = rows.read_text().splitlines(keepends=True)
    (base / "moved.jsonl").write_text("".join([lines[1], lines[0], *lines[2:]]))
    runs = commands(
        [
            ("moved", sft(*two, *more, "--resume", step2, "--dataset", str(base / "moved.jsonl"))),
            ("same", sft(*two, *more, "--resume", step2)),
            ("alone", sft("--nproc", "1", "--stage", "0", *more, "--save-total-limit", "1", "--resume", step2)),
            ("lora", sft("--nproc", "1", "--stage", "2", *noisy, "--resume", str(lora.folder / "checkpoint-2"))),
            ("killed", on(base / "killed", *two, *more, "--resume", "auto")),
            ("damaged", on(base / "damaged", *two, *more, "--resume", "auto")),
            ("ended", on(base / "ended", *two, *more, "--resume", "auto")),
            ("other", sft("--nproc", "2", "--resume", step2, "--seed", "3")),
            ("none", sft("--resume", str(base / "nothing"))),
            ("nowhere", ["sft", "--model", "tiny", "--dataset", "stdlib", "--resume", "auto"]),
            ("limit", sft("--save-total-limit", "2")),
        ]
    )
    for name in ("killed", "damaged", "ended"):
        runs[name].folder = base / name
    return runs


def test_the_losses_are_those_of_the_uninterrupted_run(whole, resumed) -> None:
    """Bit for bit on as many processes, also where the mean of a log spans the checkpoint."""
    run = resumed["same"]
    assert run.code == 0, run.output
    assert run.series("step") == [3, 6]
    assert run.series("loss") == whole["full"].series("loss")
    assert run.series("grad_norm") == whole["full"].series("grad_norm")
    assert run.series("lr") == whole["full"].series("lr")
    assert run.series("tokens") == whole["full"].series("tokens")
    assert "checkpoint-2" in run.output


def test_the_weights_are_those_of_the_uninterrupted_run(whole, resumed) -> None:
    a = (whole["full"].folder / "model" / "model.safetensors").read_bytes()
    assert (resumed["same"].folder / "model" / "model.safetensors").read_bytes() == a


def test_another_stage_and_number_of_processes(whole, resumed) -> None:
    """To 1e-6."""
    run = resumed["alone"]
    assert run.code == 0, run.output
    assert run.series("loss") == pytest.approx(whole["full"].series("loss"), abs=1e-6)
    assert run.series("tokens") == whole["full"].series("tokens")


@pytest.mark.slow
def test_fp16_gives_the_losses_of_one_process(others) -> None:
    two, one = others["half"], others["half alone"]
    assert two.code == 0, two.output
    assert one.code == 0, one.output
    assert two.series("loss") == pytest.approx(one.series("loss"), abs=2e-3)
    assert two.series("loss") != one.series("loss"), "it was computed in fp16"


@pytest.mark.slow
def test_checkpoints_of_the_weights_alone(whole, others, commands, sft) -> None:
    """A third of the size; they make a model folder, and no run goes on from them."""
    folder = others["half"].folder
    resumed = commands(
        [
            ("weights", sft("--resume", str(folder))),
            ("exported", ["export", str(folder / "checkpoint-5"), "OUT"]),
        ]
    )
    assert [name for name in names(folder) if name.startswith("checkpoint")] == ["checkpoint-5"]
    assert resumed["weights"].code == 2
    assert "checkpoint-5 holds weights only, as written with --save-only-model" in resumed["weights"].output
    light, full = (
        sum(file.stat().st_size for file in at.glob("*.distcp"))
        for at in (folder / "checkpoint-5", whole["full"].folder / "checkpoint-6")
    )
    assert light < 0.4 * full
    assert resumed["exported"].code == 0, resumed["exported"].output
    written = (resumed["exported"].folder / "model.safetensors").read_bytes()
    assert written == (folder / "model" / "model.safetensors").read_bytes()


def test_adapters_with_dropout(whole, resumed) -> None:
    """Random numbers go on where they were; the frozen base stays out of the checkpoint."""
    run = resumed["lora"]
    assert run.code == 0, run.output
    assert run.series("loss") == whole["lora"].series("loss")[2:]
    size = sum(file.stat().st_size for file in (whole["lora"].folder / "checkpoint-2").glob("*.distcp"))
    assert size < 2_000_000
    manifest = (whole["lora"].folder / "checkpoint-2" / "checkpoint.json").read_text()
    assert "lora_A" in manifest


@pytest.mark.slow
def test_in_mid_epoch_with_packing(others, commands, sft, packed: Callable[[str], list[str]]) -> None:
    """No row is seen twice in an epoch or passed over, and losses are the same, bit for bit."""
    first = others["packed"]
    run = commands([("rest", sft(*packed("rest"), "--resume", str(first.folder / "checkpoint-2")))])["rest"]
    assert first.code == 0, first.output
    assert run.code == 0, run.output
    state = json.loads((first.folder / "checkpoint-2" / "trainer_state.json").read_text())
    assert 0 < state["epoch"] < 1
    assert run.series("loss") == first.series("loss")[2:]
    assert run.series("tokens") == first.series("tokens")[2:]
    before = [all_of[: len(all_of) - len(rest)] for all_of, rest in zip(seen(first), seen(run), strict=True)]
    assert [len(rows) for rows in before] == [2, 2]  # two steps of a row each
    assert [a + b for a, b in zip(before, seen(run), strict=True)] == seen(first)
    for epoch in (slice(0, 8), slice(8, 16)):  # 15 packed rows in 8 steps of two: the last is filled up with the first
        rows = [row for of_rank in seen(first) for row in of_rank[epoch]]
        assert len(rows) == 16
        assert len(set(rows)) == 15


def test_auto_takes_the_newest_complete_one_and_the_log_has_every_step_once(whole, resumed) -> None:
    run = resumed["killed"]
    assert run.code == 0, run.output
    assert "checkpoint-4" in run.output
    assert run.series("step") == [3, 6]
    assert run.series("loss") == whole["full"].series("loss")
    assert "checkpoint-6" in names(run.folder)
    assert "model" in names(run.folder)


def test_auto_passes_over_a_damaged_one(whole, resumed) -> None:
    """The files are named, that which is cut off and that with a wrong bit, and the run goes on from the one before."""
    run = resumed["damaged"]
    assert run.code == 0, run.output
    assert re.search(r"checkpoint-9/__\d_0.distcp has .* damaged. It is skipped.", run.output.replace("\n", ""))
    assert "distcp is damaged" in run.output
    assert run.series("loss") == whole["full"].series("loss")


def test_a_run_at_its_end_whose_last_checkpoint_is_damaged_trains_its_last_steps_again(resumed) -> None:
    run = resumed["ended"]
    assert run.code == 0, run.output
    assert "checkpoint-6" in run.output
    assert "distcp is damaged" in run.output
    assert "nothing is left to train" not in " ".join(run.output.split())
    assert "done in" in run.output


@pytest.mark.slow
def test_an_evaluation_that_a_signal_has_left_out_is_made_up_for(commands, sft, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(ENDING)
    options = "--nproc 1 --eval-steps 2 --val-split 0.3 --max-steps 4 --save-steps 4".split()
    ended = [
        *options,
        "--external-plugins",
        str(plugin),
        "--callbacks",
        "ending",
        "--output-dir",
        str(tmp_path / "run"),
    ]
    run = commands([("ended", sft(*ended))])["ended"]
    assert run.code == 130, run.output
    assert "checkpoint-2" in names(tmp_path / "run")
    again = commands([("again", sft(*ended, "--resume", "auto"))])["again"]
    assert again.code == 0, again.output
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").open())
    assert [record["step"] for record in records if "eval_loss" in record] == [2, 4]


@pytest.fixture(scope="module")
def by_epoch(commands, sft):
    """Two epochs of 3 steps with a checkpoint after each, and what goes on from the first; one that ends within one."""
    more = ["--nproc", "2", "--max-steps", "none", "--epochs", "2", "--save-strategy", "epoch"]
    return commands(
        [
            ("whole", sft(*more)),
            ("again", sft(*more, "--nproc", "2", "--resume", "RUNS/whole/checkpoint-3")),
            ("alone", sft(*more, "--nproc", "1", "--resume", "RUNS/whole/checkpoint-3", "--save-strategy", "no")),
            ("within", sft("--max-steps", "4", "--save_strategy", "epoch", "--save-total-limit", "1")),
        ]
    )


@pytest.mark.slow
def test_a_checkpoint_after_each_epoch(by_epoch) -> None:
    """And at the end, where it is within one; once each."""
    whole, again, alone = (by_epoch[name] for name in ("whole", "again", "alone"))
    for run in by_epoch.values():
        assert run.code == 0, run.output
    checkpoints = {name: [at for at in names(by_epoch[name].folder) if "checkpoint" in at] for name in by_epoch}
    assert checkpoints["whole"] == ["checkpoint-3", "checkpoint-6"]
    assert checkpoints["again"] == ["checkpoint-6"]
    assert checkpoints["within"] == ["checkpoint-4"]
    assert not checkpoints["alone"]
    assert again.series("loss") == whole.series("loss")[3:]
    assert again.series("lr") == whole.series("lr")[3:]
    assert alone.series("loss") == pytest.approx(whole.series("loss")[3:], rel=1e-6)
    weights = [(run.folder / "model" / "model.safetensors").read_bytes() for run in (whole, again)]
    assert weights[0] == weights[1]


def test_an_epoch_that_a_signal_ends_has_one_checkpoint(commands, sft, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(ENDING)
    more = ["--save-strategy", "epoch", "--external-plugins", str(plugin), "--callbacks", "ending", "--verbose"]
    folder = tmp_path / "run"
    run = commands([("ended", sft(*more, "--output-dir", str(folder)))])["ended"]
    assert run.code == 130, run.output
    assert [at for at in names(folder) if "checkpoint" in at] == ["checkpoint-2"]
    assert "there is no checkpoint" not in run.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"save_strategy": "epoch", "save_steps": 5},
            "--save-steps 5 and --save-strategy epoch: leave one of them out",
        ),
        ({"save_strategy": "no", "save_steps": 5}, "--save-steps 5 and --save-strategy no: leave one of them out"),
        (
            {"save_strategy": "epoch", "streaming": True, "max_steps": 5},
            "the length of a pass over a stream is not known",
        ),
        ({"save_strategy": "epoch", "keep_best": True, "eval_steps": 2}, "Give --save-steps 2"),
        ({"save_strategy": "no", "max_restarts": 1}, "--max-restarts resumes from checkpoints"),
        ({"save_strategy": "epoch", "max_restarts": 1}, ""),
        ({"save_strategy": "steps", "keep_best": True, "eval_steps": 500}, ""),
    ],
)
def test_when_checkpoints_are_written_is_said_once(options: dict[str, Any], said: str) -> None:
    from shardproof.train.options.config import SftConfig
    from shardproof.train.resume import check_saving

    if said:
        with pytest.raises(ConfigError, match=said):
            check_saving(SftConfig(**options))
    else:
        check_saving(SftConfig(**options))


def test_the_strategy_is_read_as_ms_swift_writes_it(tmp_path: Path) -> None:
    """YAML takes `no` for false."""
    from shardproof.cli.training import parse
    from shardproof.train.options.config import SftConfig

    file = tmp_path / "run.yaml"
    file.write_text("save_strategy: no")
    config, _ = parse(SftConfig, "", [str(file)])
    assert (config.save_strategy, config.writes_checkpoints) == ("no", False)
    config, _ = parse(SftConfig, "", ["--save_strategy", "steps"])
    assert (config.checkpoint_steps, config.writes_checkpoints) == (500, True)


@pytest.fixture(scope="module")
def without_sizes(tiny: Path, rows: Path) -> list[str]:
    """A command that says nothing of the size of batches."""
    fixed = ["sft", "--model", str(tiny), "--dataset", str(rows), "--max-steps", "6", "--learning-rate", "3e-3"]
    return [*fixed, "--save-steps", "3", "--output-dir", "OUT"]


@pytest.fixture(scope="module")
def sizes(commands, without_sizes: list[str]):
    """A run of two processes that takes the size that they get, and runs that go on from it on other numbers."""
    fixed, on = without_sizes, ["--resume", "RUNS/two/checkpoint-3"]
    return commands(
        [
            ("two", [*fixed, "--nproc", "2"]),
            ("three", [*fixed, *on, "--nproc", "3"]),
            ("other", [*fixed, *on, "--per-device-batch-size", "2"]),
            ("same", [*fixed, *on, "--per-device-batch-size", "1", "--global-batch-size", "4"]),
            ("nothing said", ["sft", *on, "--nproc", "1", "--output-dir", "OUT"]),
            ("sized", [*fixed, "--nproc", "2", "--per-device-batch-size", "1", "--gradient-accumulation-steps", "2"]),
            ("fewer", ["sft", "--resume", "RUNS/sized/checkpoint-3", "--nproc", "1", "--output-dir", "OUT"]),
            ("uneven", ["sft", "--resume", "RUNS/sized/checkpoint-3", "--nproc", "3", "--output-dir", "OUT"]),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "rows_of_each"), [([], "2 x 2"), (["--nproc", "4", "--stage", "1"], "1 x 1")])
def test_without_a_batch_size_a_run_goes_on_with_the_one_it_had(
    sizes, commands, without_sizes: list[str], processes: list[str], rows_of_each: str
) -> None:
    """To 1e-6, and it says so; with more accumulation on fewer processes."""
    whole = sizes["two"]
    assert whole.code == 0, whole.output
    start = str(whole.folder / "checkpoint-3")
    run = commands([("on", [*without_sizes, "--resume", start, *processes])])["on"]
    assert run.code == 0, run.output
    assert f"The run resumes with --global-batch-size 4, as in {start}: 4 rows a step = " in run.output
    assert rows_of_each in run.output
    assert run.series("step") == [4, 5, 6]
    assert run.series("loss") == pytest.approx(whole.series("loss")[3:], rel=1e-6)
    assert run.series("lr") == whole.series("lr")[3:]
    assert run.series("tokens") == whole.series("tokens")[3:]


def test_a_run_that_is_named_alone_goes_on_with_its_options(sizes) -> None:
    run, whole = sizes["nothing said"], sizes["two"]
    assert run.code == 0, run.output
    assert f"Options that are not given are taken from the resumed run: {whole.folder}/config.yaml" in run.output
    assert run.series("loss") == pytest.approx(whole.series("loss")[3:], rel=1e-6)
    assert run.series("lr") == whole.series("lr")[3:]


def test_sizes_of_a_run_that_is_named_alone_are_those_of_its_processes(sizes) -> None:
    """On fewer, micro-batches are what they were, and accumulation makes up for the others."""
    run, whole = sizes["fewer"], sizes["sized"]
    assert whole.code == 0, whole.output
    assert run.code == 0, run.output
    assert "The run resumes with --global-batch-size 4, as " in run.output
    assert "4 rows a step = 1 x 4 micro-batch(es) x 1 process(es)" in run.output
    assert run.series("loss") == pytest.approx(whole.series("loss")[3:], rel=1e-6)
    assert sizes["uneven"].code == 2
    assert "with --global-batch-size 4, which a resumed run keeps, and 3 processes" in sizes["uneven"].output
    assert not sizes["uneven"].folder.exists()


def test_a_size_that_is_given_or_cannot_be_met_names_the_one_to_give(sizes) -> None:
    assert sizes["three"].code == 2
    assert "with --global-batch-size 4, which a resumed run keeps, and 3 processes" in sizes["three"].output
    assert sizes["other"].code == 2
    assert "4 rows per step, but these options give 2" in sizes["other"].output
    assert "Resume with --global-batch-size 4" in sizes["other"].output.replace("\n", " ")
    for run in (sizes["three"], sizes["other"]):
        assert not run.folder.exists()
    assert sizes["same"].code == 0, sizes["same"].output
    assert "The run resumes with" not in sizes["same"].output


@pytest.mark.slow
def test_a_checkpoint_at_the_end_of_the_run_says_so(whole, commands, sft) -> None:
    """A scheduler may start a run again that has come to its end: that is no error, and no training either."""
    from shardproof.doctor.checks.resume_checks import ended
    from shardproof.train.options.config import SftConfig

    end, steps = str(whole["full"].folder / "checkpoint-6"), ["--lr-scheduler", "cosine", "--nproc", "2"]
    runs = commands(
        [
            ("same", sft(*steps, "--max-steps", "6", "--resume", end)),
            ("fewer", sft(*steps, "--max-steps", "4", "--resume", end)),
            ("epochs", sft(*steps, "--max-steps", "none", "--epochs", "2", "--resume", end)),
        ]
    )
    for name, option in (("same", "--max-steps 6"), ("fewer", "--max-steps 4"), ("epochs", "--epochs 2")):
        run = runs[name]
        assert run.code == 0, run.output
        said = " ".join(run.output.split())
        steps_of = 4 if name == "fewer" else 6
        told = f"{end} is at step 6, and {option} ends the run after step {steps_of}: nothing is left to train."
        assert said.count(told) == 1, run.output
        assert "done in" not in run.output
        assert f"weights: {run.folder / 'model'}" in run.output
        assert (run.folder / "model" / "model.safetensors").is_file()
    (check,) = ended(SftConfig(resume=end, max_steps=6), 6)
    assert (check.status, "nothing is left to train" in check.evidence) == ("warn", True)
    assert ended(SftConfig(resume=end, max_steps=7), 7) == ended(SftConfig(), 6) == []


def test_old_checkpoints_go_when_new_ones_are_there(resumed) -> None:
    """--save-total-limit 1 leaves the last one."""
    assert [name for name in names(resumed["alone"].folder) if "checkpoint" in name] == ["checkpoint-6"]


def test_other_rows_are_refused(resumed) -> None:
    assert resumed["other"].code == 2
    assert "seed 3 instead of 42" in resumed["other"].output
    assert resumed["moved"].code == 2
    assert "2 rows have moved, the first at" in resumed["moved"].output.replace("\n", " ")


@pytest.mark.slow
def test_another_optimizer_is_refused_before_anything_starts(bitsandbytes, whole, commands, sft) -> None:
    step2 = str(whole["full"].folder / "checkpoint-2")
    (run,) = commands([("other", sft("--save-steps", "2", "--resume", step2, "--optimizer", "adamw_8bit"))]).values()
    assert run.code == 2
    assert "--optimizer adamw, and --optimizer adamw_8bit keeps other" in run.output


class Written:
    """A checkpoint of a run on ten rows, and what becomes of it when they, or options, are others."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.options = folder, options
        self.lines = [json.dumps({"query": f"{i} + 1?", "response": str(i + 1)}) for i in range(10)]
        for name, content in self.order(self.lines)[0].items():
            (folder / name).write_bytes(content)

    def order(self, lines: list[str], **options: Any) -> tuple[dict[str, bytes], Any]:
        from shardproof.data.rows import read_rows
        from shardproof.train.options.config import SftConfig
        from shardproof.train.resume import order_of

        (self.folder / "rows.jsonl").write_text("\n".join(lines))
        rows = read_rows([self.folder / "rows.jsonl"])
        return order_of(SftConfig(**{"model": "tiny", **self.options, **options}), rows, len(rows), 4), rows

    def refusal(self, lines: list[str] | None = None, **options: Any) -> str:
        from shardproof.train.resume import check_order

        try:
            check_order(self.folder, *self.order(lines or self.lines, **options))
        except ConfigError as error:
            return str(error)
        return ""


def test_a_run_that_goes_on_tells_that_files_are_prepared_by_other_parts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch
) -> None:
    """Those with torchvision and those without give other values of the same picture: nothing was said."""
    from types import SimpleNamespace

    from shardproof.data.rows import Rows
    from shardproof.doctor.checks import resume_checks
    from shardproof.models.loading.processors import file_parts
    from shardproof.train.options.batch import Batch
    from shardproof.train.options.config import SftConfig
    from shardproof.train.resume import check_order, order_of
    from shardproof.train.rows.media import tell_other_parts

    def processor(ending: str) -> Any:
        hears = type("WhisperFeatureExtractor", (), {})()
        return SimpleNamespace(image_processor=type(f"ImageProcessor{ending}", (), {})(), feature_extractor=hears)

    config, rows = SftConfig(), Rows([], [])
    orders = [order_of(config, rows, 8, 4, parts=file_parts(processor(ending))) for ending in ("Pil", "")]
    for name, content in orders[0].items():
        (tmp_path / name).write_bytes(content)
    tell_other_parts(tmp_path, processor("Pil"))
    tell_other_parts(tmp_path, "a tokenizer")
    assert not caplog.text
    check_order(tmp_path, orders[1], rows)
    assert not caplog.text
    tell_other_parts(tmp_path, processor(""))
    monkeypatch.setattr(resume_checks, "starts", lambda config: [tmp_path])
    one = Batch(micro=4, accumulation=1, world_size=1)
    checks = [resume_checks.rows(config, one, rows, range(8), processor(e))[0].status for e in ("Pil", "")]
    assert checks == ["ok", "warn"]
    assert f"than when {tmp_path} was written: ImageProcessor instead of ImageProcessorPil. The model" in caplog.text


def test_rows_that_were_corrected_are_told_and_learned_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """How many and where the first stands; of rows that only lie differently in their file nothing is said."""
    written = Written(tmp_path)
    assert not written.refusal()
    assert not written.refusal([line.replace('": "', '":"') for line in written.lines])
    assert not caplog.text
    edited = [line.replace("response", "output").replace("query", "instruction") for line in written.lines[6:8]]
    assert not written.refusal([*written.lines[:6], *edited, *written.lines[8:]])
    assert "2 rows were changed, the first at" in caplog.text
    assert "rows.jsonl:7. The run continues with them as they are now." in caplog.text


def test_rows_keep_the_day_that_their_template_wrote(commands, sft, tiny: Path, tmp_path: Path, monkeypatch) -> None:
    """Templates of Llama 3.2 write the date: a run that went on on another day learned from other rows, unsaid."""
    from transformers import AutoTokenizer

    from shardproof.data.encoding import dated
    from shardproof.train.options.config import SftConfig
    from shardproof.train.sft import recipe

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%d %b %Y') }} " + str(tokenizer.chat_template))
    options = ["--chat-template", str(tmp_path / "dated.jinja"), "--output-dir", str(tmp_path / "run")]
    run = commands([("run", sft(*options, "--max-steps", "2", "--save-steps", "1"))])["run"]
    assert run.code == 0, run.output
    today = dated.today().strftime("%d %b %Y")

    config = SftConfig(**yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()))
    monkeypatch.setattr(dated, "today", lambda: date(2001, 2, 3))
    for resume, day in ((str(tmp_path / "run" / "checkpoint-1"), today), (None, "03 Feb 2001")):
        again = config.model_copy(update={"resume": resume, "output_dir": str(tmp_path / str(day))})
        prepared = recipe.prepare(again, 1, *recipe.read(again))
        assert tokenizer.decode(prepared.rows[0]["input_ids"]).startswith(day)
        assert json.loads(prepared.order["run.json"])["day"] == str(datetime.strptime(day, "%d %b %Y").date())


def test_rows_in_other_places_and_other_data_are_refused(tmp_path: Path) -> None:
    """Some would be seen twice."""
    written = Written(tmp_path)
    other = [line.replace("+", "plus") for line in written.lines]
    assert "10 rows have moved, the first at" in written.refusal(written.lines[::-1])
    assert "9 rows have moved" in written.refusal([other[0], *written.lines[:-1]])
    assert "other data: all rows have changed" in written.refusal(other)
    assert "rows 9 instead of 10" in written.refusal(written.lines[1:])
    assert "shardproof export" in written.refusal(other)


@pytest.mark.parametrize("option", ["packing", "group_by_length"])
def test_where_length_decides_on_places_every_change_is_refused(tmp_path: Path, option: str) -> None:
    written = Written(tmp_path, **{option: True})
    assert not written.refusal()
    edited = [written.lines[0].replace("+", "plus"), *written.lines[1:]]
    text = f"; with --{option.replace('_', '-')} this moves rows to other places"
    assert f"1 row was changed, the first at {tmp_path / 'rows.jsonl'}:1{text}" in written.refusal(edited)
    assert f"max_length 512 instead of 1024{text}" in written.refusal(max_length=512)


def test_options_that_make_something_else_of_the_rows_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that deal them out otherwise are refused, and those that do neither are nobody's business."""
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}")
    written = Written(tmp_path, chat_template=str(template))
    assert not written.refusal(logging_steps=3)
    assert not caplog.text
    template.write_text("{{ messages }}!")
    assert not written.refusal(system="Be brief.", loss="all")
    for told in ("system Be brief. instead of None", "loss all instead of answer", "chat_template"):
        assert told in caplog.text
    assert "packing True instead of False" in written.refusal(packing=True)
    assert "was written with --optimizer adamw, but --optimizer lion keeps" in written.refusal(optimizer="lion")


def test_options_that_could_have_no_effect_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The optimizer's state keeps rates, and adapters count as they did; what holds from here on only is told."""
    written = Written(tmp_path)
    told = "written with other options, which a resumed run must keep: --learning-rate 0.003 instead of 0.0001."
    assert told in written.refusal(learning_rate=3e-3)
    for option in (
        {"weight_decay": 0.5},
        {"adam_beta2": 0.5},
        {"tuner": "lora"},
        {"lora_rank": 4},
        {"lora_alpha": 64.0},
        {"part_learning_rates": {"llm": 1}},
    ):
        assert f"--{next(iter(option)).replace('_', '-')} " in written.refusal(**option)
    assert not caplog.text
    coming = {"epochs": 5.0, "model": "other", "lr_scheduler": "linear", "pooling": "mean", "loss_temperature": 0.5}
    assert not written.refusal(**coming)
    for told in ("--epochs 5.0 instead of 1.0", "--model other instead of tiny", "--lr-scheduler linear instead of"):
        assert told in caplog.text
    for told in ("--pooling mean instead of None", "--loss-temperature 0.5 instead of None"):
        assert told in caplog.text


def test_one_folder_in_several_spellings_is_one_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the checkpoint has it as it was given; a link that leads elsewhere since then is told."""
    for name in ("base", "other", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    written = Written(tmp_path / "run", model="link")
    for name in ("base", "./base/", str(tmp_path / "link"), "other/../base"):
        assert not written.refusal(model=name)
    assert not caplog.text
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "other")
    assert not written.refusal(model="link")
    assert "--model " in caplog.text
    caplog.clear()
    said = json.loads((tmp_path / "run" / "run.json").read_text())
    said["options"]["model"] = "base/"
    (tmp_path / "run" / "run.json").write_text(json.dumps(said))
    assert not written.refusal(model=str(tmp_path / "base"))
    assert not caplog.text


def test_another_algorithm_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from shardproof.data.rows import Rows
    from shardproof.train.options.config import SftConfig
    from shardproof.train.options.rlhf_config import RlhfConfig
    from shardproof.train.resume import check_order, order_of

    rows = Rows([], [])
    order = {kind: order_of(RlhfConfig(rlhf_type=kind), rows, 4, 4) for kind in ("dpo", "orpo")}
    for name, content in order["dpo"].items():
        (tmp_path / name).write_bytes(content)
    check_order(tmp_path, order_of(RlhfConfig(beta=0.3, ref_model="x"), rows, 4, 4), rows)
    assert "--beta 0.3 instead of None" in caplog.text
    assert "--ref-model x instead of None" in caplog.text
    with pytest.raises(ConfigError, match="--rlhf-type orpo instead of dpo"):
        check_order(tmp_path, order["orpo"], rows)
    with pytest.raises(ConfigError, match="sft"):
        check_order(tmp_path, order_of(SftConfig(), rows, 4, 4), rows)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("rlhf", {"rlhf_type": "kto"}, ["The reference point of kto is a mean", "6 now and 12 in"]),
        ("rlhf", {"rlhf_type": "kto", "loss_type": ["apo_zero_unpaired"]}, []),
        ("rlhf", {"rlhf_type": "dpo"}, []),
        ("rlhf", {"rlhf_type": "gkd", "lmbda": 0.0}, []),
        (
            "rlhf",
            {"rlhf_type": "grpo"},
            ["samples its answers at random: on 1 instead of 2, the run continues with different answers"],
        ),
        ("sft", {"task": "embedding"}, ["With --loss infonce", "6 now and 12 in", "--per-device-batch-size 12 keeps"]),
        ("sft", {"task": "embedding", "loss": "contrastive"}, []),
    ],
)
def test_losses_that_other_micro_batches_change_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch, kind: str, options: dict[str, Any], words: list[str]
) -> None:
    """Two processes with 6 rows each go on as one with two times 6: a step has the same rows."""
    from shardproof.data.rows import Rows
    from shardproof.doctor.checks import resume_checks
    from shardproof.train.options.batch import Batch
    from shardproof.train.options.config import SftConfig
    from shardproof.train.options.rlhf_config import RlhfConfig
    from shardproof.train.resume import check_order, order_of
    from shardproof.train.rows.dealt import dealt, tell_other_processes

    config, rows = (RlhfConfig if kind == "rlhf" else SftConfig)(**options), Rows([], [])
    two, one, large = (Batch(micro=m, accumulation=a, world_size=w) for m, a, w in ((6, 1, 2), (6, 2, 1), (12, 1, 1)))
    for name, content in order_of(config, rows, 48, 12, dealt(two)).items():
        (tmp_path / name).write_bytes(content)
    saved = check_order(tmp_path, order_of(config, rows, 48, 12, dealt(one)), rows)
    tell_other_processes(saved, tmp_path, config, two)
    assert not caplog.text
    tell_other_processes(saved, tmp_path, config, one)
    assert all(word in caplog.text for word in words), caplog.text
    assert bool(caplog.text) == bool(words)
    monkeypatch.setattr(resume_checks, "starts", lambda config: [tmp_path])
    checks = [resume_checks.rows(config, batch, rows, range(48))[0] for batch in (two, one)]
    assert [check.status for check in checks] == ["ok", "warn" if words else "ok"]
    assert all(word in checks[1].evidence for word in words)
    caplog.clear()
    tell_other_processes(saved, tmp_path, config, large)
    assert bool(caplog.text) == (options.get("rlhf_type") == "grpo")


def test_a_checkpoint_of_an_earlier_release_says_less(tmp_path: Path) -> None:
    """What it does not say is not compared."""
    written = Written(tmp_path)
    (tmp_path / "rows.crc32").unlink()
    said = {"rows": 10, "global_batch_size": 4, "seed": 42}
    (tmp_path / "run.json").write_text(json.dumps(said))
    assert not written.refusal(written.lines[::-1], system="Be brief.")
    assert "group_by_length True instead of False" in written.refusal(group_by_length=True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("none", "this folder does not exist"),
        ("nowhere", "name that folder"),
        ("limit", "add --save-steps"),
    ],
)
def test_what_cannot_be_resumed_is_told_before_anything_starts(resumed, name: str, text: str) -> None:
    run = resumed[name]
    assert run.code == 2, run.output
    assert text in run.output
    assert "Traceback" not in run.output
    assert len(run.output.strip().splitlines()) <= 3


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (
            ["trainer_state.json", "latest", "global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt"],
            "shardproof convert",
        ),
        (["trainer_state.json", "pytorch_model_fsdp_0/.metadata"], "shardproof convert"),
        (["trainer_state.json", "adapter_config.json", "optimizer.pt"], "Merge its adapters with PEFT"),
        (["trainer_state.json", "model.safetensors", "optimizer.pt"], "Start from its weights: --model"),
        (["model.safetensors"], "holds no complete checkpoint"),
    ],
)
@pytest.mark.parametrize("name", ["checkpoint-4", "."])
def test_a_checkpoint_of_swift_is_told_what_to_do_with(tmp_path: Path, files: list[str], told: str, name: str) -> None:
    from shardproof.train.options.config import SftConfig
    from shardproof.train.resume import starts

    for file in files:
        (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / file).write_text("global_step4")
    with pytest.raises(ConfigError, match=told) as caught:
        starts(SftConfig(resume=str(tmp_path)))
    assert len(files) == 1 or str(tmp_path / name) in str(caught.value)


def test_records_whose_text_has_odd_ends_of_lines_stay_in_the_log(tmp_path: Path) -> None:
    """U+2028 and its like end a line for Python's `splitlines`, and not in JSON Lines. The last line was cut off."""
    from shardproof.train.folder import RunFolder

    said = [json.dumps({"step": step, "completion": "a\u2028b\x85c"}, ensure_ascii=False) + "\n" for step in (1, 2, 3)]
    log = tmp_path / "completions.jsonl"
    log.write_bytes("".join(said).encode() + said[0].encode()[:28])
    RunFolder(tmp_path).forget_after(2)
    assert log.read_bytes() == "".join(said[:2]).encode()
    assert [file.name for file in tmp_path.iterdir()] == [log.name]


def test_two_jobs_in_one_run_folder_are_refused(tmp_path: Path) -> None:
    """As long as the first one is there, and no longer."""
    from shardproof.train.folder import RunFolder
    from shardproof.train.options.config import SftConfig

    config = SftConfig(output_dir=str(tmp_path / "out"))
    first = RunFolder.create(config)
    with pytest.raises(ConfigError, match=r"Another job is running in .*out"):
        RunFolder.create(config, goes_on=True)
    assert first.lock is not None
    first.lock.release()
    RunFolder.create(config)


def checkpoint_in(folder: Path, step: int, *, of_a_run: bool = True) -> Path:
    """A complete one, of a model of one weight."""
    import torch

    import shardproof

    model = shardproof.shard(torch.nn.Linear(1, 1), 0)
    files = {"trainer_state.json": json.dumps({"global_step": step}).encode()} if of_a_run else {}
    optimizer = torch.optim.SGD(model.parameters())
    return shardproof.save(model, optimizer, folder / f"checkpoint-{step}", files=files).wait()


def refusal(**options: Any) -> str:
    """Why a run is not begun; empty if it is."""
    from shardproof.train.folder import RunFolder
    from shardproof.train.options.config import SftConfig

    try:
        RunFolder.check(SftConfig(**options))
    except ConfigError as error:
        return str(error)
    return ""


def test_nothing_that_was_trained_is_removed_unasked(tmp_path: Path) -> None:
    """A finished model, damaged checkpoints, those of another program, and runs beside the one that goes on."""
    out = tmp_path / "out"
    out.mkdir()
    auto = {"output_dir": str(out), "resume": "auto"}
    assert not refusal(**auto)
    (out / "config.yaml").touch()
    assert not refusal(**auto)  # it was killed before there was a checkpoint
    (out / "model").mkdir()
    assert "has no checkpoint to resume from, but it has model, which" in refusal(**auto)
    assert not refusal(**auto, overwrite=True)
    assert refusal(output_dir=str(out)).endswith("\nName another --output-dir, or add --overwrite.")
    good = checkpoint_in(out, 2)
    assert not refusal(**auto)
    assert refusal(output_dir=str(out)).endswith(", or continue from its newest checkpoint with --resume auto.")
    other = checkpoint_in(tmp_path / "other", 4)
    assert "holds a run already" in refusal(output_dir=str(out), resume=str(other))
    assert not refusal(output_dir=f"{out}/../out", resume=str(good))
    file = next(good.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    assert f"but it has model, checkpoint-2, which a run from the start would remove. {file} has" in refusal(**auto)
    (tmp_path / "theirs" / "checkpoint-500").mkdir(parents=True)
    assert "holds files from another program (checkpoint-500)" in refusal(output_dir=str(tmp_path / "theirs"))


def test_the_folder_that_is_resumed_in_may_be_named_in_another_way(tmp_path: Path) -> None:
    """A run that goes on removes nothing."""
    from shardproof.train.options.config import SftConfig
    from shardproof.train.resume import in_own_folder

    good = checkpoint_in(tmp_path / "out", 2)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for name in ("out", "link", "out/../out"):
        assert in_own_folder(SftConfig(output_dir=str(tmp_path / name), resume=str(good)))
    assert not in_own_folder(SftConfig(output_dir=str(tmp_path / "new"), resume=str(good)))


def test_a_checkpoint_that_no_run_wrote_is_refused(tmp_path: Path) -> None:
    """Nothing says at which step it was."""
    good = checkpoint_in(tmp_path / "out", 2, of_a_run=False)
    for resume in ("auto", str(good)):
        assert "holds no trainer_state.json" in refusal(output_dir=str(tmp_path / "out"), resume=resume)


@pytest.mark.slow
def test_a_killed_run_goes_on_by_itself_and_no_second_job_gets_in(
    sft: Callable[..., list[str]], tmp_path: Path
) -> None:
    """SIGKILL to all processes of a run; the same command again goes on. While it runs, another one is refused."""
    folder = tmp_path / "out"
    argv = [str(folder) if arg == "OUT" else arg for arg in sft("--save-steps", "1", "--resume", "auto")]
    argv = last_of_each([*argv, "--nproc", "2", "--max-steps", "100000", "--save-total-limit", "2"])
    command = [sys.executable, "-m", "shardproof", *argv]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0)
    try:
        limit = time.monotonic() + 120
        while not (folder / "checkpoint-3").exists() and time.monotonic() < limit:
            time.sleep(0.01)
        second = subprocess.run(
            [sys.executable, "-m", "shardproof", *argv], capture_output=True, text=True, timeout=120
        )
        assert second.returncode == 2, second.stdout + second.stderr
        assert "Another job is running in" in second.stderr
        os.killpg(first.pid, signal.SIGKILL)
        first.wait(30)
        time.sleep(0.5)
        steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        argv[argv.index("100000")] = str(steps[-1] + 2)
        again = subprocess.run([sys.executable, "-m", "shardproof", *argv], capture_output=True, text=True, timeout=120)
        assert again.returncode == 0, again.stdout + again.stderr
        assert "resumed" in again.stdout
        logged = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert logged == list(range(1, steps[-1] + 3))
        assert (folder / "model" / "model.safetensors").is_file()
    finally:
        if first.poll() is None:
            os.killpg(first.pid, signal.SIGKILL)
