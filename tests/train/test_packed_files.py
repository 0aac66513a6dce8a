"""Promise: rows with files that are packed have the loss and the gradients of rows by themselves, and a model for which
they have others is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.data.encoding.encode import IGNORE
from shardproof.data.encoding.pack import PackedMediaRows
from shardproof.data.forms.parts import Problem, has_files
from shardproof.data.media.batches import MediaCollator
from shardproof.data.rows import read_rows
from shardproof.errors import ConfigError
from shardproof.models.families.known import family_of
from shardproof.train.losses.packed_files import PLACES
from shardproof.train.losses.shortcuts import check_chunked_loss, check_packed_files, checks, chunked_loss
from shardproof.train.model.loading import load_model, load_processing
from shardproof.train.options.config import SftConfig
from shardproof.train.sft import recipe as sft
from shardproof.train.show import show
from train.test_families import MEDIA, ROWS

pytestmark = pytest.mark.slow

OMNI = "qwen2_5_omni"
SPATIAL = "qwen2_vl"  # its decoder looks for packed rows only where positions come with those in space
TEXT = [{"query": "who?", "response": "me, and others"}]
REFUSED = ["gemma3"]  # its masks are made before its decoder
CARRIES = "minicpmv4_6"  # its layers carry a state from token to token
PACKED = [*(kind for kind in MEDIA if kind not in REFUSED), CARRIES]


def prepared(folder: Path, kind: str, files: Path, more: Sequence[Any] = (), **options: Any) -> Any:
    """The config, the rows and `more`, and what makes batches of them."""
    family = family_of({"model_type": kind})
    rows = [row for media in ("text", *family.media) for row in ROWS[media]] + [*more]
    file = files / f"packed-{kind}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"max_length": 400, **options}
    config = SftConfig(model=str(folder), dataset=[str(file)], packing=True, workers=0, **options)
    processing = load_processing(str(folder), config)
    found = sft.encode(config, read_rows([str(file)]), processing)
    return config, found, MediaCollator(sft.media_encoder(config, processing))


@pytest.mark.parametrize("kind", [OMNI, CARRIES, *(pytest.param(k, marks=pytest.mark.slow) for k in PACKED[:-1])])
def test_packed_rows_are_what_each_is_by_itself(tiny_models, files: Path, kind: str) -> None:
    more = [{"query": f"who {i}?", "response": "me, and others " * i} for i in range(1, 9)]
    config, rows, collate = prepared(tiny_models(kind), kind, files, more=more, max_length=130)
    assert isinstance(rows, PackedMediaRows)
    model = load_model(config.model, config)
    inputs = collate([rows[i] for i in range(len(rows))])
    assert inputs[PLACES[0]].ge(0).sum() == inputs["attention_mask"].sum() < inputs[PLACES[0]].numel(), (
        "some is padding"
    )
    assert 1 < len(inputs[PLACES[0]]) == len(rows) < len(rows.unpacked)
    for few in rows.few():
        check_packed_files(model, collate([few]))
    check_chunked_loss(model, inputs)
    alone = collate([rows.unpacked[n] for pack in rows.packs for n in pack])
    assert all(name in PLACES or value.equal(alone[name]) for name, value in inputs.items())
    expected = model(**alone).loss
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss = chunked_loss(model, inputs)
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    collate.flat = True  # as FlashAttention wants it
    flat = collate([rows[i] for i in range(len(rows))])
    assert all(len(flat[name]) == 1 for name in PLACES)
    torch.testing.assert_close(chunked_loss(model, flat), expected, atol=1e-5, rtol=1e-5)
    assert {name for name, p in model.named_parameters() if p.grad is not None} == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, atol=2e-5, rtol=1e-3, msg=name)


def test_each_row_is_shown_by_itself(tiny_models, files: Path) -> None:
    config, rows, _ = prepared(tiny_models(OMNI), OMNI, files)
    shown, report = show(config, 3)
    assert [row.input_ids for row in shown] == [rows.unpacked[i]["input_ids"] for i in range(3)]
    assert report.kept == len(rows.unpacked)


def test_a_model_is_tried_on_rows_with_files_and_on_rows_without(tiny_models, files: Path) -> None:
    _, rows, collate = prepared(tiny_models(OMNI), OMNI, files, more=TEXT)
    seen = [[has_files(each["row"].messages) for each in few["rows"]] for few in rows.few()]
    assert seen == [[True, True], [False, False]]
    assert all(len(collate([few])[PLACES[0]]) == 1 for few in rows.few())


@pytest.mark.parametrize("kind", [SPATIAL, *(pytest.param(k, marks=pytest.mark.slow) for k in PACKED if k != SPATIAL)])
def test_packed_rows_of_text_only_are_what_each_is_by_itself(tiny_models, files: Path, kind: str) -> None:
    """A micro-batch may have no row with a file, and the model then leaves positions to its decoder."""
    config, rows, collate = prepared(tiny_models(kind), kind, files, more=TEXT)
    model, few = load_model(config.model, config), rows.few()[1]
    inputs, alone = collate([few]), collate(few["rows"])
    torch.testing.assert_close(chunked_loss(model, inputs), model(**alone).loss, atol=1e-5, rtol=1e-5)
    check_packed_files(model, inputs)


def test_the_first_token_of_each_row_is_never_learnt(tiny_models, files: Path) -> None:
    """Nor behind another row in a packed row."""
    config, rows, collate = prepared(tiny_models(SPATIAL), SPATIAL, files, more=TEXT, loss="all")
    model = load_model(config.model, config)
    inputs = collate([rows[i] for i in range(len(rows))])
    alone = collate([rows.unpacked[n] for pack in rows.packs for n in pack])
    assert alone["labels"][:, 0].ne(IGNORE).any()
    torch.testing.assert_close(chunked_loss(model, inputs), model(**alone).loss, atol=1e-5, rtol=1e-5)


def test_packed_rows_say_where_the_rows_in_them_stand(tiny_models, files: Path) -> None:
    _, rows, _ = prepared(tiny_models(OMNI), OMNI, files)
    assert len(rows.places) == len(rows)
    for number in range(len(rows)):
        assert rows.places.within(number) == [each["row"].where for each in rows[number]["rows"]]


def test_what_is_dropped_in_training_makes_no_model_another(tiny_models, files: Path) -> None:
    config, rows, collate = prepared(tiny_models(SPATIAL), SPATIAL, files)
    model = load_model(config.model, config).train()
    for part in model.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.5
    check_packed_files(model, collate(rows.few()[:1]))
    assert model.training


def test_a_model_is_not_tried_on_rows_whose_files_are_lost(tiny_models, files: Path, monkeypatch) -> None:
    config, rows, collate = prepared(tiny_models(SPATIAL), SPATIAL, files)

    def lost(self: Any, row: Any) -> Any:
        raise Problem("it is gone")

    monkeypatch.setattr(type(collate.encoder), "files", lost)
    check_packed_files(load_model(config.model, config), collate(rows.few()[:1]))


def test_a_model_whose_rows_of_text_would_see_others_is_refused(tiny_models, files: Path, monkeypatch) -> None:
    config, rows, collate = prepared(tiny_models(SPATIAL), SPATIAL, files, more=TEXT)
    monkeypatch.setattr("shardproof.train.losses.packed_files.in_space", lambda model: False)
    tried, _ = checks(True, False, lambda: (collate([few]) for few in rows.few()))
    with pytest.raises(ConfigError, match="do not give the results that each gives alone"):
        tried(load_model(config.model, config), {})


def test_a_row_that_is_lost_leaves_the_others_of_its_packed_row(tiny_models, files: Path, monkeypatch, caplog) -> None:
    _, rows, collate = prepared(tiny_models(OMNI), OMNI, files)
    whole, lost = collate([rows[0]]), rows[0]["rows"][0]["row"]
    read = type(collate.encoder).files

    def files_of(self: Any, row: Any) -> Any:
        if row.line == lost.line:
            raise Problem("it is gone")
        return read(self, row)

    monkeypatch.setattr(type(collate.encoder), "files", files_of)
    rest = collate([rows[0]])
    assert f"{lost.where} is left out of its step" in caplog.text
    assert len(rest["input_ids"]) == len(whole["input_ids"]) - 1
    assert rest[PLACES[0]].ge(0).sum() == rest["attention_mask"].sum()
    assert rest[PLACES[1]].eq(0).sum() == len(rest["input_ids"]) + rest[PLACES[0]].lt(0).sum()


def test_a_packed_row_that_is_lost_leaves_the_others(tiny_models, files: Path, caplog) -> None:
    _, rows, collate = prepared(tiny_models(OMNI), OMNI, files)
    first, *others = rows.few()[0]["rows"]
    changed = {**first, "input_ids": [*first["input_ids"][:-1], 0]}
    found, rest = collate([{"rows": [changed]}, {"rows": others}]), collate([{"rows": others}])
    assert f"{first['row'].where} is left out of its step: a file has changed" in caplog.text
    assert found.keys() == rest.keys()
    assert all(value.equal(rest[name]) for name, value in found.items())


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_whose_rows_would_see_others_is_refused(tiny_models, files: Path, kind: str) -> None:
    config, rows, collate = prepared(tiny_models(kind), kind, files)
    with pytest.raises(ConfigError, match="packed rows with files do not give the results that each gives alone"):
        check_packed_files(load_model(config.model, config), collate(rows.few()[:1]))


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ({"metrics": ["mine"]}, "--metrics"),
        ({"train_parts": ["thinker", "talker"]}, "--train-parts talker"),
        ({"liger_kernel": True}, "--liger-kernel"),
    ],
)
def test_what_wants_logits_does_not_go_with_it(tiny_models, files: Path, options, other: str) -> None:
    with pytest.raises(ConfigError, match=f"--packing and {other}: packed rows with files have no logits"):
        prepared(tiny_models(OMNI), OMNI, files, **options)


FIXED = "--max-steps 4 --global-batch-size 2 --per-device-batch-size 1 --lr-scheduler constant --workers 0 --packing"
WAYS = {
    "one": ["--stage", "0"],
    "two": ["--stage", "3", "--nproc", "2", "--gradient-checkpointing"],
    "parts": ["--stage", "2", "--nproc", "2", "--chunked-loss"],
}


@pytest.fixture(scope="module")
def train(commands, tiny_models, files: Path):
    def run(kinds, *more: str):
        jobs = []
        for kind in kinds:
            prepared(tiny_models(kind), kind, files)
            rows = str(files / f"packed-{kind}.jsonl")
            argv = ["sft", "--model", str(tiny_models(kind)), "--dataset", rows, "--output-dir", "OUT", *FIXED.split()]
            argv += ["--val-dataset", rows, "--max-length", "250", "--learning-rate", "3e-3", *more]
            jobs += [(f"{kind}-{name}", [*argv, *way]) for name, way in WAYS.items()]
        return commands(jobs)

    return run


def check_equal(done, kind: str, ways=WAYS) -> None:
    """The first of `ways` is one process."""
    one, *others = (done[f"{kind}-{name}"] for name in ways)
    assert one.code == 0, one.output
    assert one.series("loss")[-1] < one.series("loss")[0]
    for run in others:
        assert run.code == 0, run.output
        assert run.series("loss") == pytest.approx(one.series("loss"), abs=2e-5)
        assert run.series("eval_loss") == pytest.approx(one.series("eval_loss"), abs=2e-5)
        assert run.series("grad_norm") == pytest.approx(one.series("grad_norm"), rel=1e-4)
        assert run.series("tokens") == one.series("tokens")


def test_runs_have_the_losses_of_one_process(train) -> None:
    check_equal(train([OMNI]), OMNI)


def test_packed_rows_of_text_may_reach_nothing_that_is_trained(commands, tiny_models, files: Path) -> None:
    """Only the aligner learns, and most packed rows are of text, cut to their longest."""
    prepared(tiny_models(SPATIAL), SPATIAL, files, more=[{"query": "who?", "response": "me, and others " * 40}] * 8)
    argv = ["sft", "--model", str(tiny_models(SPATIAL)), "--dataset", str(files / f"packed-{SPATIAL}.jsonl")]
    argv += ["--output-dir", "OUT", *FIXED.split(), "--max-length", "80", "--truncation", "right"]
    (run,) = commands([("aligner", [*argv, "--train-parts", "aligner"])]).values()
    assert run.code == 0, run.output
    assert 0.0 == min(run.series("grad_norm")) < max(run.series("grad_norm"))


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--tuner", "lora"]], ids=["full", "lora"])
def test_so_have_those_of_every_family(train, more: list[str]) -> None:
    done = train(PACKED, *more)
    for kind in PACKED:
        check_equal(done, kind)
