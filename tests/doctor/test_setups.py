"""Promise: `shardproof doctor` tells what is wrong with a setup, not something else, and nothing of a sound one."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardproof.doctor import trial
from shardproof.doctor.checks import data_checks, machine, model_checks
from shardproof.doctor.config import DoctorConfig, RlhfDoctorConfig
from shardproof.errors import ConfigError


def statuses(checks) -> dict[str, str]:
    return {check.name: check.status for check in checks}


# --- data ---------------------------------------------------------------------------------------------


def test_tokens_of_white_space_are_no_duplicates():
    """Gemma, Pythia and Phi have one for each number of spaces."""
    from shardproof.models.tiny import train_tokenizer

    tokenizer = train_tokenizer(["a few words"])
    tokenizer.add_tokens(["  ", "    ", "\n\n", "\t"])
    (check,) = data_checks.special_tokens(tokenizer)
    assert check.status == "ok"


def test_one_token_may_begin_and_end_a_text():
    """As in GPT-2, OPT and Pythia."""
    from shardproof.models.tiny import train_tokenizer

    tokenizer = train_tokenizer(["a few words"])
    tokenizer.bos_token = tokenizer.eos_token
    (check,) = data_checks.special_tokens(tokenizer)
    assert (check.status, "begins it" in check.evidence) == ("ok", True)


def test_words_that_were_added_with_and_without_a_space_are_no_special_tokens():
    from shardproof.models.tiny import train_tokenizer

    tokenizer = train_tokenizer(["a few words"])
    tokenizer.add_tokens(["shard", " shard"])
    assert data_checks.special_tokens(tokenizer)[0].status == "ok"


@pytest.mark.parametrize(("dropped", "status"), [(4, "ok"), (58, "warn"), (95, "fail")])
def test_a_run_on_the_shorter_rows_is_told_and_no_failure(dropped, status):
    """As examples/rlhf learns from four of ten solutions."""
    from shardproof.data.encoding.report import EncodeReport

    report = EncodeReport(100, 100 - dropped, 0, dropped, 0, 5000, 2000, 566, 61)
    assert statuses(data_checks.lengths(report, DoctorConfig()))["lengths"] == status


def test_rows_with_files_are_not_said_to_be_cut():
    from shardproof.data.rows import Row

    text = Row([{"role": "user", "content": "which?"}], "rows.jsonl", 1)
    seen = Row([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "rows.jsonl", 2)
    cuts = ["--truncation right"]
    assert data_checks.longer_than(90, cuts, [text]) == "--max-length 90, or --truncation right"
    smaller = "--max-length 90, or smaller files (--max-pixels, --max-frames)"
    assert data_checks.longer_than(90, cuts, [text, seen], cut_beside_files=False) == smaller
    told = f"{smaller}, or --truncation right (for rows without files)"
    assert data_checks.longer_than(90, cuts, [text, seen]) == told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "44 % of a micro-batch of 4 rows; --packing or --padding-free avoids computing it"),
        ({"task": "seq_cls"}, "44 % of a micro-batch of 4 rows; --padding-free avoids computing it"),
        ({"padding_free": True}, None),
        ({"packing": True}, None),
        ({"group_by_length": True}, None),
    ],
)
def test_padding_is_told(options: dict[str, Any], told: str | None):
    from datasets import Dataset

    from shardproof.train.options.config import Batch

    config, several = DoctorConfig(**options), Batch(micro=4, accumulation=1, world_size=1)
    rows = Dataset.from_dict({"input_ids": [[1] * 8, [1], [1] * 8, [1]]})
    checks = data_checks.padding(config, several, rows)
    assert [check.evidence for check in checks] == ([told] if told else [])
    assert not data_checks.padding(config, Batch(micro=1, accumulation=4, world_size=1), rows)
    equal = Dataset.from_dict({"input_ids": [[1] * 3] * 8})
    assert all(
        check.evidence == "0 % of a micro-batch of 4 rows" for check in data_checks.padding(config, several, equal)
    )


@pytest.mark.parametrize(
    ("row", "status"), [({"query": "a", "response": "b"}, "warn"), ({"text": "a b"}, "ok")], ids=["asked", "raw"]
)
def test_raw_text_is_learnt_whole_and_has_no_questions(row, status, tmp_path):
    from shardproof.data.encoding.report import EncodeReport
    from shardproof.data.forms.formats import SFT
    from shardproof.data.rows import read_rows

    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    report = EncodeReport(rows=1, kept=1, tokens=100, learnt_tokens=100)
    checks = data_checks.lengths(report, DoctorConfig(), read_rows([str(tmp_path / "rows.jsonl")], form=SFT))
    assert statuses(checks)["answers"] == status


def test_the_option_of_a_refusal_is_whole():
    from shardproof.doctor.checks.check import option_in

    assert option_in(ConfigError("--fp8 is for training every weight.")) == "--fp8"


# --- machine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "seen", "status"),
    [
        ({"save_strategy": "epoch", "max_steps": 25}, "after every 10 of 25 steps, and at the end", "ok"),
        ({"save_steps": 10}, "after every 10 of 25 steps, and at the end", "ok"),
        ({"save_steps": 5}, "after every 5 of 25 steps", "ok"),
        ({"save_steps": 25}, "one, at the end of 25 steps", "warn"),
        ({"save_strategy": "steps"}, "one, at the end of 25 steps", "warn"),
        ({"save_strategy": "epoch", "epochs": 2.5}, "after every 10 of 25 steps, and at the end", "ok"),
        ({"save_strategy": "epoch", "epoch": 25}, "one, at the end of 25 steps", "ok"),
    ],
)
def test_when_checkpoints_will_be_written_is_told(options, seen: str, status: str):
    options = dict(options)
    epoch = options.pop("epoch", 10)
    (check,) = machine.checkpoints(DoctorConfig(**options), 25, epoch)
    assert (check.evidence, check.status) == (seen, status)
    assert "--save-steps" in check.option or status == "ok"
    assert machine.checkpoints(DoctorConfig(), 25, 10) == []


def test_every_checkpoint_that_is_kept_counts(tmp_path):
    """All are kept unless --save-total-limit says otherwise."""
    config = DoctorConfig(save_steps=10)
    assert machine.bytes_to_write(config, 1000, 1000, steps=1000, epoch=10) == 4000 + 100 * 12_000
    assert machine.bytes_to_write(config, 1000, 1000, steps=25, epoch=10) == 4000 + 3 * 12_000
    epochs = DoctorConfig(save_strategy="epoch", epochs=2.5)
    assert machine.bytes_to_write(epochs, 1000, 1000, steps=25, epoch=10) == 4000 + 3 * 12_000
    some = {"save_steps": 10, "save_total_limit": 2}
    assert machine.bytes_to_write(DoctorConfig(**some), 1000, 1000, steps=1000, epoch=10) == 4000 + 3 * 12_000
    assert machine.bytes_to_write(DoctorConfig(**some), 1000, 1000, steps=10, epoch=10) == 4000 + 12_000
    best = DoctorConfig(save_steps=10, save_total_limit=1, keep_best=True)  # that of the best evaluation, too
    assert machine.bytes_to_write(best, 1000, 1000, steps=1000, epoch=10) == 4000 + 3 * 12_000
    only = DoctorConfig(save_steps=10, save_only_model=True)
    assert machine.bytes_to_write(only, 1000, 1000, steps=20, epoch=10) == 4000 + 2 * 4000
    half = DoctorConfig(save_steps=10, dtype="bf16", precision="bf16", stochastic_rounding=True)
    assert machine.bytes_to_write(half, 1000, 1000, steps=10, epoch=10) == 2000 + 6000
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "dtype": "bfloat16"}')
    assert machine.bytes_to_write(DoctorConfig(model=str(tmp_path)), 1000, 1000, steps=10, epoch=10) == 2000
    adapters = DoctorConfig(save_steps=10, tuner="lora")
    assert machine.bytes_to_write(adapters, 1000, 10, steps=10, epoch=10) == 40 + 120


KINDS = {"full": [], "adapters": ["--tuner", "lora"], "weights": ["--dtype", "bf16", "--save-only-model"]}


@pytest.mark.slow
def test_what_a_run_writes_is_what_was_told(tiny, rows, commands):
    """Weights and checkpoints of the tiny model, all of which are kept."""
    fixed = ["--model", str(tiny), "--dataset", str(rows), "--global-batch-size", "8", "--max-steps", "6"]
    fixed += ["--save-steps", "2"]
    without = ["--json", "--plan", "no", "--trial", "no"]
    runs = [(f"run {kind}", ["sft", *fixed, *more, "--output-dir", "OUT"]) for kind, more in KINDS.items()]
    looks = [(f"doctor {kind}", ["doctor", *fixed, *more, *without]) for kind, more in KINDS.items()]
    done = commands([*runs, *looks])
    for kind in KINDS:
        assert done[f"run {kind}"].code == 0, done[f"run {kind}"].output
        (disk,) = [check for check in checks_of(done[f"doctor {kind}"]) if check["name"] == "disk"]
        told = 1e9 * float(disk["evidence"].split(" GB")[0])
        sizes = [file.stat().st_size for file in done[f"run {kind}"].folder.rglob("*") if file.is_file()]
        written = sum(size for size in sizes if size > 100_000)  # without logs and tokenizers
        assert written == pytest.approx(told, rel=0.1, abs=6e6), kind  # told to 10 MB


def test_a_folder_that_cannot_be_made_is_found_and_not_made(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("{}\n")
    (check,) = machine.output(DoctorConfig(output_dir=str(file / "run")))
    assert (check.status, check.option) == ("fail", "--output-dir")
    assert "is a file" in check.evidence
    assert machine.output(DoctorConfig(output_dir=str(tmp_path / "new" / "run"))) == []
    assert list(tmp_path.iterdir()) == [file]


def test_a_short_run_is_refused_for_nothing_that_the_run_is_not():
    """What is about checkpoints means nothing in two steps that leave none."""
    from shardproof.doctor.observe import short_run
    from shardproof.train.run import recipe_of

    saves = {"save_steps": 5, "save_total_limit": 2, "max_restarts": 3, "min_processes": 1, "output_dir": "run"}
    named: Any = {"model": "tiny", "dataset": ["rows.jsonl"]}
    judged: Any = {"save_steps": 2, "eval_steps": 2, "val_split": 0.1}
    for config in (
        DoctorConfig(**named, **saves, nproc=2, profile=2, val_split=0.1, eval_steps=2),
        DoctorConfig(**named, save_steps=5, save_only_model=True),
        DoctorConfig(**named, **judged, keep_best=True, early_stop=3, best_metric="acc"),
        DoctorConfig(**named, **judged, predict_with_generate=True, answer_metrics=["chrf"], max_new_tokens=9),
        RlhfDoctorConfig(**named, **saves, nproc=2),
    ):
        recipe: Any = recipe_of(config)
        batch = recipe.check(config, config.nproc)
        short = short_run(config, batch, config.nproc, 3, "folder")
        assert recipe.check(short, short.nproc).whole == batch.whole
        assert short.profile is None


# --- model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "option"),
    [
        ("--freeze llm leaves nothing to train: the model has llm.", "parts", "--freeze"),
        ("--train-parts vision: this model has no such part, it has llm.", "parts", "--train-parts"),
        ("--target-modules q_prj: the model has no module of that name.", "adapters", "--target-modules all-linear"),
        ("The model here cannot be loaded: no.\nName the file with --external-plugins.", "model", "--model"),
    ],
)
def test_an_option_that_the_model_does_not_fit_is_named(text, name, option):
    check = model_checks.not_loaded(ConfigError(text))
    assert (check.status, check.name, check.option) == ("fail", name, option)


def test_weights_that_are_rounded_by_chance_need_no_masters():
    import torch
    from torch import nn

    model = nn.Linear(4, 4).to(torch.bfloat16)
    assert statuses(model_checks.places(model))["master weights"] == "warn"
    assert statuses(model_checks.places(model, rounded=True))["master weights"] == "ok"


def test_a_model_with_more_than_weights_in_its_folder_is_loaded(tiny_models):
    """Qwen2.5-Omni's from_pretrained loads voices, and takes what comes back for a model."""
    from shardproof.train.model.loading import load_model

    folder = str(tiny_models("qwen2_5_omni"))
    model, info = load_model(folder, DoctorConfig(model=folder), output_loading_info=True)
    assert hasattr(model, "thinker")
    assert statuses(model_checks.loading(info)) == {"weights": "ok"}
    assert model_checks.embedding_of(model) is model.thinker.get_input_embeddings()
    assert statuses(model_checks.tied(model)) == {"tied weights": "ok"}  # its thinker's head and embedding are apart


def test_what_no_step_reaches_and_a_talker_are_frozen_as_they_should_be(tiny_models):
    """Nobody has to ask for that. A layer that is frozen in a part that is trained is told."""
    from shardproof.models.families.anatomy import anatomy
    from shardproof.train.adapters.adding import with_adapters
    from shardproof.train.model.loading import load_model

    config = DoctorConfig(model=str(tiny_models("qwen2_5_omni")))
    model = with_adapters(load_model(config.model, config), config)
    (check,) = model_checks.trained(model, config)
    assert (check.status, "talker" in check.evidence) == ("ok", True)
    name = next(name for name, part in anatomy(model).part_of.items() if part == "llm")
    model.get_parameter(name).requires_grad_(False)
    (check,) = model_checks.trained(model, config)
    assert (check.status, "(part: llm)" in check.cause, name in check.evidence) == ("fail", True, True)


# --- trial --------------------------------------------------------------------------------------------

SOUND: dict[str, Any] = {
    "without": [],
    "parts": {},
    "not_finite": [],
    "apart": [],
    "steps": 3,
    "moved": 0.05,
    "clocks": 0.0,
    "software": ["a"],
    "network": 1e9,
    "losses": [2.0, 1.5, 1.2],
    "norms": [1.0, 1.0, 1.0],
    "left_out": 0,
    "drawn": None,
}


def judged(folder: Path, *kinds: Any, **more: Any) -> dict[str, Any]:
    (folder / trial.RESULT).write_text(json.dumps({**SOUND, **more}))
    return {check.name: check for check in trial.judge(str(folder), *(kinds or [()]))}


def test_a_sound_course_is_found_sound(tmp_path):
    assert {check.status for check in judged(tmp_path).values()} == {"ok"}


@pytest.mark.parametrize(
    ("losses", "status"),
    [
        ([-1.0, -1.0, -1.0], "ok"),  # of SimPO, a robust DPO, or a loss of one's own
        ([-1.0, -1.5, -1.8], "ok"),
        ([-1.0, -0.5, -0.2], "fail"),
        ([0.69, 0.5, 0.4], "ok"),
        ([2.0, 9.0, 1.0], "ok"),
        ([2.0, 1.0, 2.4], "fail"),
        ([2.0, None, 1.0], "fail"),
    ],
)
def test_a_loss_that_rises_is_told_from_one_that_is_below_zero(tmp_path, losses, status):
    assert judged(tmp_path, losses=losses)["loss"].status == status


def test_a_rate_that_replaces_the_weights_fails_although_the_loss_sinks(tmp_path):
    """As with DPO, whose loss is about two answers only."""
    check = judged(tmp_path, losses=[0.69, 0.42, 0.45], moved=3.0)["loss"]
    assert (check.status, "300 %" in check.evidence, "--learning-rate" in check.option) == ("fail", True, True)


def test_steps_that_a_loss_scale_leaves_out_are_no_failure(tmp_path):
    """In fp16. Of a run whose every step is left out so far, nothing is said but that."""
    some = judged(tmp_path, left_out=2, norms=[1.0], steps=1)
    assert {check.status for check in some.values()} == {"ok"}
    assert "2 of 3 steps" in some["loss scale"].evidence
    every = judged(tmp_path, left_out=3, norms=[], steps=0, moved=None)
    assert {name: check.status for name, check in every.items()} == {"ranks": "ok", "loss scale": "warn"}


def test_steps_that_change_nothing_are_told(tmp_path):
    check = judged(tmp_path, losses=[2.0, 2.0, 2.0], moved=0.0)["loss"]
    assert (check.status, "--learning-rate" in check.option) == ("warn", True)


@pytest.mark.parametrize(("spreads", "status"), [((0.0, 1.4), "ok"), ((1.4, 0.0), "fail")])
def test_a_first_step_whose_answers_are_worth_the_same_is_no_failure(tmp_path, spreads, status):
    """Its gradient is zero, as it should be; that of answers which are worth different things is not."""
    drawn = [{"reward": 1.0, "reward_std": spread} for spread in spreads]
    seen = judged(tmp_path, losses=[0.0, 0.0, 0.0], norms=[0.0, 1.0, 1.0], drawn=drawn)
    assert (seen["gradient norm"].status, seen["rewards"].status) == (status, "ok")


def test_parts_for_files_that_no_row_has_are_no_failure(tmp_path):
    """A model that sees and hears, trained on words or on pictures."""
    without = {
        "thinker.audio_tower.layers.0.fc1.weight": "audio",
        "thinker.visual.blocks.0.norm1.weight": "vision",
        "model.multi_modal_projector.weight": "aligner",
    }
    words = judged(tmp_path, without=list(without), parts=without)
    assert (words["unused parts"].status, words["gradients"].status) == ("warn", "ok")
    assert words["unused parts"].option == "--freeze aligner audio vision"
    pictures = judged(tmp_path, {"image"}, without=list(without)[:1], parts=without)
    assert (pictures["unused parts"].status, pictures["gradients"].status) == ("warn", "ok")
    lost = judged(tmp_path, {"image"}, without=list(without)[1:2], parts=without)
    assert (lost["gradients"].status, "unused parts" in lost) == ("fail", False)
    asked = judged(tmp_path, {"image", "audio"}, {"image"}, without=list(without)[:1], parts=without)
    assert (asked["gradients"].status, "unused parts" in asked) == ("ok", False), "no step may have heard anything"
    always = judged(tmp_path, without=["model.layers.0.weight"], parts={"model.layers.0.weight": "llm"})
    assert always["gradients"].status == "fail"


def test_the_end_of_a_tower_that_features_do_not_come_from_spoils_nothing(tmp_path):
    """As the last norm of Granite Vision's, of which there is no record."""
    tower, words = "model.vision_tower.", "model.language_model.norm.weight"
    names = [f"{tower}{rest}" for rest in ("embeddings.weight", "layers.0.weight", "post_layernorm.weight")]
    part_of = {**dict.fromkeys(names, "vision"), words: "llm"}
    there = {**dict.fromkeys(names, True), words: True}
    assert trial._behind_features({**there, names[2]: False}, part_of) == names[2:]
    assert trial._behind_features({names[2]: False, **there, names[2]: False}, part_of) == names[2:]
    assert trial._behind_features({**there, names[1]: False}, part_of) == []
    assert trial._behind_features({**dict.fromkeys(names, False), words: True}, part_of) == []
    assert trial._behind_features({**there, words: False}, part_of) == []
    seen = judged(tmp_path, {"image"}, without=names[1:], parts=part_of, behind=names[2:])
    assert (seen["unused layers"].status, seen["gradients"].status) == ("warn", "fail")
    assert names[2] in seen["unused layers"].evidence
    assert names[2] not in seen["gradients"].evidence


def test_adapters_of_a_layer_whose_weight_is_read_spoil_nothing(tmp_path):
    """As those of `dt_proj` in Mamba, which --target-modules all-linear has."""

    def adapters(layer: int, name: str) -> list[str]:
        return [f"base_model.model.layers.{layer}.mixer.{name}.lora_{side}.default.weight" for side in "AB"]

    read, called = (adapters(0, name) + adapters(1, name) for name in ("dt_proj", "in_proj"))
    has = {**dict.fromkeys(read, False), **dict.fromkeys(called, True)}
    assert trial._unread(has) == read
    assert trial._unread({**has, called[0]: False}) == read, "another of that name has one"
    assert trial._unread({**has, read[0]: True}) == []
    assert trial._unread(dict.fromkeys([*read, *called], False)) == []
    parts = dict.fromkeys([*read, "head.weight"], "llm")
    seen = judged(tmp_path, without=list(parts), parts=parts, unread=read)
    assert (seen["unused adapters"].status, seen["gradients"].status) == ("warn", "fail")
    assert "dt_proj" in seen["unused adapters"].option
    assert "dt_proj" not in seen["gradients"].evidence
    alone = judged(tmp_path, without=read, parts=parts, unread=read)
    assert alone["gradients"].evidence == "every other trained parameter has one, and it is finite"


def test_a_trial_has_a_row_for_each_kind_of_files():
    assert trial.with_each(range(4), {}) == [0, 1, 2, 3]
    assert trial.with_each(range(4), {"image": 2}) == [0, 1, 2, 3]
    assert trial.with_each(range(4), {"image": 3, "audio": 40}) == [0, 1, 3, 40]
    assert trial.with_each(range(2), {"image": 7, "audio": 9, "video": 11}) == [7, 9]


def test_the_share_by_which_matrices_change_is_that_of_their_norms():
    import torch

    pairs = [(torch.tensor([3.0, 4.0]), torch.tensor([3.3, 4.3])), (torch.zeros(2), torch.full((2,), 0.4))]
    assert trial._moved([]) is None
    assert trial._moved(pairs) == pytest.approx(math.sqrt(2 * 0.09 + 2 * 0.16) / 5)


# --- commands -----------------------------------------------------------------------------------------


def checks_of(run) -> list[dict[str, Any]]:
    return json.loads(run.output[run.output.find("{") :])["checks"]


def odd(name: str, rows: Path, base: Path, tiny: Path) -> list[str]:
    """The options of a setup in which one thing is wrong."""
    data = ["--dataset", str(rows)]
    if name == "no such rows to evaluate on":
        return [*data, "--val-dataset", str(base / "gone.jsonl")]
    if name == "a bad row to evaluate on":
        held_out = base / "val.jsonl"
        held_out.write_text("".join(rows.read_text().splitlines(keepends=True)[:3]) + '{"query": "no answer"}\n')
        return [*data, "--val-dataset", str(held_out)]
    if name == "a bad row beside a mixture":
        held_out = base / "val.jsonl"
        held_out.write_text('{"query": "a", "response": "b"}\n{"query": "no answer"}\n')
        return [*data, str(rows), "--interleave-prob", "0.5", "0.5", "--val-dataset", str(held_out)]
    if name == "one target of two":
        return [*data, "--tuner", "lora", "--target-modules", "q_proj", "no_such"]
    if name == "nothing left":
        return [*data, "--freeze", "llm"]
    if name == "no such metric":
        return [*data, "--val-split", "0.2", "--metrics", "no_such"]
    if name == "no such attention here":
        return [*data, "--attn", "flex_attention"]  # on a CPU
    if name == "a run is there":
        (base / "config.yaml").write_text("model: tiny\n")
        return [*data, "--output-dir", str(base)]
    if name == "another shape":
        shutil.copytree(tiny, base / "other")
        told = json.loads((tiny / "config.json").read_text())
        (base / "other" / "config.json").write_text(json.dumps({**told, "intermediate_size": 384}))
        return [*data, "--model", str(base / "other")]
    names = base / "names.jsonl"
    names.write_text('{"frage": "a", "antwort": "b"}\n' * 4)
    return ["--dataset", str(names)] if name == "other names" else [*data, "--output-dir", f"{names}/run"]


@pytest.mark.parametrize(
    ("setup", "name", "option"),
    [
        ("no such rows to evaluate on", "rows to evaluate on", "--val-dataset"),
        ("a bad row to evaluate on", "rows to evaluate on", "--bad-rows"),
        ("a bad row beside a mixture", "rows to evaluate on", "--bad-rows"),
        ("one target of two", "adapters", "--target-modules"),
        ("nothing left", "parts", "--freeze"),
        ("no such metric", "options", "--metrics"),
        ("no such attention here", "options", "--attn"),
        ("a run is there", "options", "--output-dir"),
        ("other names", "rows", "--columns"),
        ("another shape", "weights", "config.json"),
        ("a file in the way", "output", "--output-dir"),
    ],
)
def test_what_is_wrong_is_told_with_its_option(setup, name, option, tiny, rows, tmp_path, capsys):
    from shardproof.cli.main import main

    argv = odd(setup, rows, tmp_path, tiny)
    model = [] if "--model" in argv else ["--model", str(tiny)]
    fixed = ["doctor", "--json", *model, "--global-batch-size", "4", "--plan", "no", "--trial", "no"]
    before = sorted(tmp_path.rglob("*"))
    assert main([*fixed, *argv]) == 1
    told = [check for check in json.loads(capsys.readouterr().out)["checks"] if check["status"] == "fail"]
    assert [check["name"] for check in told] == [name]
    assert option in told[0]["option"]
    assert told[0]["cause"]
    assert sorted(tmp_path.rglob("*")) == before  # nothing is left behind
