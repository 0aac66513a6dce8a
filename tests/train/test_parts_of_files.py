"""Promise: rows with files that several processes share have the loss and the gradients of one process, whatever path
each group takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardproof.data.rows import read_rows
from shardproof.errors import ConfigError
from shardproof.models.attention.laid_out import laid_out
from shardproof.models.families.known import family_of
from shardproof.train.model.loading import load_processing
from shardproof.train.options.config import SftConfig
from shardproof.train.sft import recipe as sft
from train.test_families import MEDIA, ROWS
from train.test_packed_files import OMNI, REFUSED, check_equal

pytestmark = pytest.mark.slow

KINDS = [OMNI, *(kind for kind in MEDIA if kind != OMNI)]
FIXED = "--max-steps 3 --global-batch-size 4 --lr-scheduler constant --workers 0 --learning-rate 3e-3"
WAYS = {
    "one": "--stage 0 --per-device-batch-size 1",
    "two": "--stage 3 --per-device-batch-size 1 --nproc 2 --sequence-parallel 2",
    "pairs": "--stage 2 --per-device-batch-size 2 --nproc 2 --sequence-parallel 2 --gradient-checkpointing",
    "four": "--stage 3 --per-device-batch-size 1 --nproc 4 --sequence-parallel 2",
}
FEW = "one", "two", "four"


@pytest.fixture(scope="module")
def train(commands, tiny_models, files: Path):
    """`train(kinds, ways, *more)`: for each kind of model and way a run; some of the rows have files."""

    def run(kinds, ways, *more: str):
        jobs = []
        for kind in kinds:
            family = family_of({"model_type": kind})
            rows = [row for media in ("text", *family.media) for row in ROWS[media]] * 3
            file = files / f"parts-{kind}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            argv = ["sft", "--model", str(tiny_models(kind)), "--dataset", str(file), "--output-dir", "OUT"]
            argv += ["--val-dataset", str(file), *FIXED.split(), *more]
            jobs += [(f"{kind}-{name}", [*argv, *WAYS[name].split()]) for name in ways]
        return commands(jobs)

    return run


def test_parts_of_rows_with_files_train_as_one_process(train) -> None:
    check_equal(train([OMNI], FEW), OMNI, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_so_do_those_of_every_family(train, kind: str) -> None:
    check_equal(train([kind], WAYS), kind, WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in REFUSED])
def test_so_do_packed_rows(train, kind: str) -> None:
    check_equal(train([kind], WAYS, "--packing", "--max-length", "400"), kind, WAYS)


def test_what_is_added_to_tokens_of_pictures_is_that_of_the_part() -> None:
    marks = torch.tensor([[False, True, True, False], [True, False, True, True]])
    added = [torch.arange(5.0)[:, None], torch.arange(10.0, 15.0)[:, None]]
    given = {"visual_pos_masks": marks, "deepstack_visual_embeds": added, "attention_mask": torch.ones(2, 4)}
    places = torch.arange(8).view(2, 4).chunk(2, 1)[1]
    _, found = laid_out((), given, (2, 4), places, torch.tensor([[2, 3]] * 2), False)
    assert found["visual_pos_masks"].tolist() == [[True, False], [True, True]]
    assert [of_layer.flatten().tolist() for of_layer in found["deepstack_visual_embeds"]] == [[1, 3, 4], [11, 13, 14]]


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ({"train_parts": ["thinker", "talker"]}, "--train-parts talker"),
        ({"loss": "mine"}, "--loss mine"),
    ],
)
def test_what_wants_logits_does_not_go_with_it(tiny_models, files: Path, options, other: str) -> None:
    file = files / "parts-refused.jsonl"
    file.write_text(json.dumps(ROWS["image"][0]) + "\n")
    folder = str(tiny_models(OMNI))
    config = SftConfig(model=folder, dataset=[str(file)], sequence_parallel=2, workers=0, **options)
    with pytest.raises(ConfigError, match=f"--sequence-parallel and {other}: parts of rows with files"):
        sft.encode(config, read_rows([str(file)]), load_processing(folder, config))


LOSE = """
import os
import shardproof
from transformers import TrainerCallback


@shardproof.register_callback("lose")
class Lose(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1 and os.path.exists({file!r}):
            os.rename({file!r}, {file!r} + ".gone")
"""


@pytest.mark.slow
def test_a_lost_file_ends_the_run_on_all_ranks(commands, tiny_models, files: Path, tmp_path: Path) -> None:
    picture = tmp_path / "mine.png"
    picture.write_bytes((files / "a.png").read_bytes())
    rows = [{"query": "<image>which digit?", "response": "two", "images": [str(picture)]}] * 8
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "lose.py").write_text(LOSE.format(file=str(picture)))
    argv = ["sft", "--model", str(tiny_models("qwen2_vl")), "--dataset", str(tmp_path / "rows.jsonl")]
    argv += ["--output-dir", "OUT", *FIXED.split(), *WAYS["two"].split()]
    argv += ["--external-plugins", str(tmp_path / "lose.py"), "--callbacks", "lose"]
    (run,) = commands([("lost", argv)]).values()
    assert run.code == 2, run.output
    assert "mine.png): there is no such file" in run.output
    assert "Traceback" not in run.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (OMNI, "--tuner lora --lora-rank 4"),
        ("qwen3_vl", "--gradient-checkpointing --checkpointing-reentrant"),
        ("gemma3", "--train-parts vision aligner --loss all"),
        ("internvl", "--offload all --keep-gathered 0"),
    ],
)
def test_so_they_do_with_other_options(train, kind: str, more: str) -> None:
    check_equal(train([kind], FEW, *more.split()), kind, FEW)
