"""Omni and vision models train on pictures, sounds and texts in any mixture, with the losses of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardproof.errors import ConfigError, DataError

OMNI, MINICPM_V = "qwen2_5_omni", "minicpmv4_6"
PLAN = [(1, 0), (4, 3)]
REST = [(n, s) for n in (1, 2, 4) for s in range(4)]


def named(runs):
    return {f"n{n}s{s}{''.join(more)}": (n, s, *more) for n, s, *more in runs}


@pytest.fixture(scope="module")
def mixed(files: Path) -> Path:
    """Rows with a picture, with two, with a sound, with both, and with neither: no two neighbours are alike."""
    rows = [
        {"query": "<image>which digit?", "response": "two and seven", "images": ["a.png"]},
        {"query": "what is said?", "response": "nothing at all"},
        {"query": "<audio>what do you hear?", "response": "noise", "audios": ["a.wav"]},
        {"query": "<image> or <image>?", "response": "both", "images": ["b.png", "a.png"]},
        {"query": "<audio> is <image>?", "response": "no, it is not", "images": ["b.png"], "audios": ["a.wav"]},
    ]
    file = files / "mixed.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    seen = [row for row in rows if "audios" not in row]
    (files / "seen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in seen * 5))
    return file


@pytest.fixture(scope="module")
def train(commands, tiny_models, mixed: Path):
    def run(kind: str, plan, *options: str):
        rows = mixed if kind == OMNI else mixed.with_name("seen.jsonl")
        fixed = "--max-steps 3 --global-batch-size 4 --per-device-batch-size 1 --lr-scheduler constant --workers 0"
        argv = ["sft", "--model", str(tiny_models(kind)), "--dataset", str(rows), "--output-dir", "OUT", *fixed.split()]
        argv += ["--learning-rate", "3e-3", "--val-split", "0.1"]
        return commands(
            [
                (name, [*argv, "--nproc", str(n), "--stage", str(s), *more, *options])
                for name, (n, s, *more) in plan.items()
            ]
        )

    return run


def check_equal(done) -> None:
    for name, run in done.items():
        assert run.code == 0, f"{name}:\n{run.output}"
    first, *others = done.values()
    assert first.series("loss")[-1] < first.series("loss")[0]
    for run in others:
        assert run.series("loss") == pytest.approx(first.series("loss"), abs=2e-5)
        assert run.series("eval_loss") == pytest.approx(first.series("eval_loss"), abs=2e-5)
        assert run.series("grad_norm") == pytest.approx(first.series("grad_norm"), rel=1e-4)
        assert run.series("tokens") == first.series("tokens")


@pytest.mark.parametrize("kind", [OMNI, pytest.param(MINICPM_V, marks=pytest.mark.slow)])
def test_ranks_with_different_files_have_the_losses_of_one_process(train, kind: str) -> None:
    check_equal(train(kind, named(PLAN)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OMNI, MINICPM_V])
def test_at_every_stage_on_any_number_of_ranks(train, kind: str) -> None:
    check_equal(train(kind, named([*REST, (2, 3, "--chunked-loss")])))
    check_equal(train(kind, named([(1, 0), (2, 2), (4, 3)]), "--gradient-checkpointing"))
    check_equal(train(kind, named([(1, 0), (2, 1), (4, 3)]), "--tuner", "lora"))


@pytest.mark.slow
def test_boxes_in_pictures_have_the_losses_of_one_process(commands, tiny_models, files: Path) -> None:
    """Written as the model writes them, in an answer or a question, and answered from rows as well."""
    row = {"query": "<image>find <ref-object>", "response": "<bbox>", "images": ["a.png"]}
    rows = [{**row, "objects": {"ref": [f"it {i}"], "bbox": [[i, i, 12 + i, 9 + i]]}} for i in range(6)]
    rows += [{"query": "<image>at <bbox>?", "response": "two", "images": ["b.png"], "objects": {"bbox": [[3, 4]]}}] * 3
    file = files / "boxes.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fixed = "--max-steps 3 --global-batch-size 4 --per-device-batch-size 1 --lr-scheduler constant --workers 0"
    argv = ["sft", "--model", str(tiny_models("qwen2_5_vl")), "--dataset", str(file), "--output-dir", "OUT"]
    argv += [*fixed.split(), "--learning-rate", "3e-3"]
    ask = ["infer", "RUNS/n1s0", "--dataset", str(file), "--result-path", "OUT", "--max-new-tokens", "2"]
    done = commands(
        [
            ("n1s0", [*argv, "--stage", "0"]),
            ("n2s3", [*argv, "--stage", "3", "--nproc", "2"]),
            ("asked", ask),
        ]
    )
    asked = done.pop("asked")
    assert asked.code == 0, asked.output
    assert "left out" not in done["n1s0"].output
    one, two = done.values()
    assert (one.code, two.code) == (0, 0), one.output + two.output
    assert two.series("loss") == pytest.approx(one.series("loss"), abs=2e-5)
    assert two.series("tokens") == one.series("tokens")


@pytest.mark.slow
def test_rows_without_files_may_reach_nothing_that_is_trained(train) -> None:
    """Only the aligner learns, and some micro-batches are of texts: on one process and on a rank among others."""
    check_equal(train(MINICPM_V, named([(1, 0), (2, 3), (2, 2, "--chunked-loss")]), "--train-parts", "aligner"))


@pytest.fixture(scope="module")
def runs(commands, tiny_models, mixed: Path, files: Path):
    """An omni model with and without its talker, parts of it, adapters on it, and what can be done with them."""
    fixed = "--output-dir OUT --max-steps 2 --global-batch-size 4 --lr-scheduler constant --learning-rate 1e-2"
    argv = ["sft", "--model", str(tiny_models(OMNI)), "--dataset", str(mixed), *fixed.split()]
    voiced = mixed.with_name("voiced.jsonl")  # some rows with a spoken answer, and most without
    rows = [json.loads(line) for line in mixed.read_text().splitlines()]
    voiced.write_text("".join(json.dumps(r if i % 3 else {**r, "codes": [i, 5, 7]}) + "\n" for i, r in enumerate(rows)))
    seen = mixed.with_name("seen.jsonl")
    talking = [*(str(voiced) if arg == str(mixed) else arg for arg in argv), "--train-parts", "thinker,talker"]
    ask = ["--prompt", "<image>which digit?", "--image", str(files / "a.png"), "--audio", str(files / "a.wav")]
    return commands(
        [
            ("speaking", [*argv, "--enable-audio-output", "1", "--freeze", "vision,audio", "--workers", "1"]),
            (
                "silent",
                [*argv, "--nproc", "2", "--enable-audio-output", "0", "--part-learning-rates", "vision=0,aligner=0.1"],
            ),
            ("lora", [*argv, "--tuner", "lora", "--freeze", "audio"]),
            ("ask", ["infer", "RUNS/lora", *ask, "--max-new-tokens", "4"]),
            ("export", ["export", "RUNS/silent", "OUT"]),
            ("talking1", [*talking, "--stage", "0"]),
            ("talking2", [*talking, "--stage", "3", "--nproc", "2", "--workers", "0"]),
            ("mute", [*argv, "--train-parts", "thinker,talker"]),
            ("no_talker", [*argv, "--enable-audio-output", "0", "--train-parts", "talker"]),
            ("unseen", [*(str(seen) if arg == str(mixed) else arg for arg in argv), "--train-parts", "audio"]),
        ]
    )


def test_a_run_in_which_no_file_reaches_what_is_trained_is_refused(runs) -> None:
    assert runs["unseen"].code == 2, runs["unseen"].output
    said = " ".join(runs["unseen"].output.split())
    assert "Nothing would be learned: only audio is trained, and the rows have files of kind image" in said


LOSING = """
import pathlib, shardproof
from transformers import TrainerCallback

@shardproof.register_callback("losing")
class Losing(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        pathlib.Path(__file__).with_name("lost.png").unlink(missing_ok=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_step_whose_rows_are_all_lost_learns_nothing(commands, tiny_models, files: Path, tmp_path, nproc) -> None:
    """Its loss is 0, and those of the steps behind it are numbers."""
    import torch

    from shardproof.train.options.config import Batch
    from shardproof.train.rows.sampler import GlobalBatchSampler

    (tmp_path / "losing.py").write_text(LOSING)
    (tmp_path / "lost.png").write_bytes((files / "a.png").read_bytes())
    seen = {"query": "<image>which digit?", "response": "two and seven", "images": ["lost.png"]}
    rows = [seen if i % 3 else {"query": "what is said?", "response": "nothing at all"} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch = Batch(micro=2 // nproc, accumulation=1, world_size=nproc)
    steps = torch.tensor([[*part] for rank in range(nproc) for part in GlobalBatchSampler(12, batch, rank, 42)])
    empty = (steps.view(nproc, 6, -1) % 3).ne(0).all(-1).all(0).tolist()
    assert True in empty[:-1]
    assert False in empty
    fixed = f"--max-steps 6 --global-batch-size 2 --stage 3 --nproc {nproc} --workers 0 --weight-decay 0.1"
    argv = ["sft", "--model", str(tiny_models(OMNI)), "--dataset", str(tmp_path / "rows.jsonl"), *fixed.split()]
    argv += ["--external-plugins", str(tmp_path / "losing.py"), "--callbacks", "losing", "--output-dir", "OUT"]
    (run,) = commands([("lost", argv)]).values()
    assert run.code == 0, run.output
    assert "lost.png): there is no such file" in run.output
    assert [loss == 0 for loss in run.series("loss")] == empty
    assert [norm == 0 for norm in run.series("grad_norm")] == empty
    assert all(value.isfinite().all() for value in weights(run.folder / "model").values())


def weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def changed(folder: Path, start: Path) -> set[str]:
    """The parts of the omni model in `folder` that differ from the one it began as."""
    from shardproof.models.families.anatomy import anatomy
    from shardproof.models.loading.classes import load_pretrained

    before = dict(load_pretrained(str(start)).named_parameters())
    model = load_pretrained(str(folder))
    part_of = anatomy(model).part_of
    return {part_of[name] for name, value in model.named_parameters() if not value.equal(before[name])}


def test_the_talker_is_kept_as_it_was(runs, tiny_models) -> None:
    from transformers import Qwen2_5OmniForConditionalGeneration

    assert runs["speaking"].code == 0, runs["speaking"].output
    folder, start = runs["speaking"].folder / "model", tiny_models(OMNI)
    assert weights(folder).keys() == weights(start).keys()
    assert changed(folder, start) == {"llm", "aligner"}
    model = Qwen2_5OmniForConditionalGeneration.from_pretrained(folder)
    assert model.has_talker
    assert list(model.speaker_map) == ["Chelsie"]


def test_without_audio_output_there_is_no_talker(runs, tiny_models) -> None:
    from transformers import Qwen2_5OmniForConditionalGeneration

    assert runs["silent"].code == 0, runs["silent"].output
    folder, start = runs["silent"].folder / "model", tiny_models(OMNI)
    assert not [name for name in weights(folder) if not name.startswith("thinker.")]
    assert changed(folder, start) == {"llm", "audio", "aligner"}  # at its own learning rate, vision stood still
    assert not Qwen2_5OmniForConditionalGeneration.from_pretrained(folder).has_talker
    refused = runs["no_talker"]
    assert refused.code == 2
    assert "with --enable-audio-output no, there is no talker" in refused.output


def test_the_talker_learns_from_rows_with_codes(runs, tiny_models) -> None:
    """Ranks whose rows have none do not run it."""
    one, two = runs["talking1"], runs["talking2"]
    assert (one.code, two.code) == (0, 0), one.output + two.output
    assert two.series("loss") == pytest.approx(one.series("loss"), abs=2e-5)
    assert "talker" in changed(two.folder / "model", tiny_models(OMNI))
    assert runs["mute"].code == 2
    assert "--train-parts talker needs rows with 'codes'" in runs["mute"].output


def test_it_is_asked_with_files_and_exported(runs) -> None:
    for name in ("ask", "export"):
        assert runs[name].code == 0, runs[name].output
    assert "computes the same logits" in runs["export"].output
    assert (runs["export"].folder / "spk_dict.pt").is_file()


def test_adapters_are_on_the_parts_that_are_trained(runs) -> None:
    names = weights(runs["lora"].folder / "model")
    assert any("visual" in name for name in names)
    assert not [name for name in names if "audio_tower.layers" in name or "lm_head" in name or "talker" in name]


def test_what_is_not_built_is_not_read(tiny_models, monkeypatch) -> None:
    """Of the file with all weights, those of the talker are never touched."""
    import safetensors
    import transformers.modeling_utils as loader

    from shardproof.models.loading.classes import load_pretrained

    asked: list[str] = []

    class Watched:
        def __init__(self, *args, **kwargs) -> None:
            self.file = safetensors.safe_open(*args, **kwargs)

        def __getattr__(self, name: str):
            return getattr(self.file, name)

        def get_slice(self, name: str):
            return WatchedSlice(name, self.file.get_slice(name))

        def get_tensor(self, name: str):
            asked.append(name)
            return self.file.get_tensor(name)

        def __enter__(self):
            return self

        def __exit__(self, *args) -> None:
            pass

    class WatchedSlice:
        def __init__(self, name: str, part) -> None:
            self.name, self.part = name, part

        def __getattr__(self, name: str):
            return getattr(self.part, name)

        def __getitem__(self, index):
            asked.append(self.name)
            return self.part[index]

    monkeypatch.setattr(loader, "safe_open", Watched)
    model = load_pretrained(str(tiny_models(OMNI)), enable_audio_output=False)
    assert not hasattr(model, "talker")
    assert asked
    assert {name.split(".")[0] for name in asked} == {"thinker"}


def test_what_a_run_says_of_files_is_what_they_are_read_with() -> None:
    from shardproof.train.options.config import SftConfig
    from shardproof.train.rows.media import media_limits

    said = {"max_pixels": 500, "max_frame_pixels": 300, "max_seconds": 7.0, "max_frames": 5, "fps": 1.5}
    limits = media_limits(SftConfig(**said), None)
    assert {name: getattr(limits, name) for name in said} == said
    assert media_limits(SftConfig(), None).fps is None


def test_codes_that_the_talker_does_not_know_are_found_before_training(tiny_models) -> None:
    from shardproof.data.rows import Row
    from shardproof.train.rows.media import check_codes

    def rows(kind: str, codes: list, **turn):
        turns = [{"role": "user", "content": "which?"}, {"role": "assistant", "content": "two", **turn}]
        check_codes(str(tiny_models(kind)), [Row(turns, "rows.jsonl", 3, {"codes": codes})])

    rows(OMNI, [0, 63])
    rows("qwen3_omni_moe", [[1087, 63, 0]])
    for kind, codes, told in (
        (OMNI, [5, 64], "'codes' holds 64, but the talker knows codes from 0 to 63"),
        ("qwen3_omni_moe", [[1087, 63, 0], [1, 1, 64]], "'codes' holds 64, but the talker knows codes from 0 to 63"),
        ("qwen3_omni_moe", [[1088, 63, 0]], "'codes' holds 1088, but the talker knows codes from 0 to 1087"),
    ):
        with pytest.raises(DataError, match=rf"rows\.jsonl:3: {told}"):
            rows(kind, codes)
    with pytest.raises(DataError, match=r"rows\.jsonl:3: 'codes' belong to the last answer, which is not trained on"):
        rows(OMNI, [5], loss=False)


def test_rows_to_evaluate_on_need_no_codes(tiny_models) -> None:
    from shardproof.data.rows import Row
    from shardproof.train.options.config import SftConfig
    from shardproof.train.rows.media import check_codes, check_spoken

    turns = [{"role": "user", "content": "which?"}, {"role": "assistant", "content": "two"}]
    silent, spoken = Row(turns, "rows.jsonl", 1, {}), Row(turns, "rows.jsonl", 2, {"codes": [5]})
    model = str(tiny_models(OMNI))
    check_codes(model, [silent])
    config = SftConfig(model=model, dataset=["x"], train_parts=["talker"])
    check_spoken(config, [silent, spoken])
    with pytest.raises(ConfigError, match="--train-parts talker needs rows with 'codes'"):
        check_spoken(config, [silent])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"loss": "all"}, "--loss all and --train-parts talker"),
        (
            {"loss_type": "dft"},
            "--loss-type dft computes the loss of text, but --train-parts talker also learns speech codes",
        ),
        ({"loss": "mine"}, "--loss mine computes the loss of text, but --train-parts talker also learns speech codes"),
    ],
)
def test_a_talker_is_not_trained_where_codes_would_have_no_loss(options: dict, told: str) -> None:
    from shardproof.train.options.config import SftConfig
    from shardproof.train.sft.recipe import check

    config = SftConfig(model="x", dataset=["y"], train_parts=["thinker", "talker"], **options)
    with pytest.raises(ConfigError, match=told):
        check(config, 1)
