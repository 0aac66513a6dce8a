"""Families train as one process does: words, real pictures and sounds through the processor of each, three steps at
stage 3 on two ranks with different files. All of it is slow; tests/train/test_media.py runs two families each time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardproof.models.families.known import FAMILIES, family_of

OMNI = "qwen3_omni_moe"
MEDIA = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_audio", "voxtral", "internvl", "llava", "gemma3", OMNI]
WORDS = [kind for family in FAMILIES if not family.media for kind in family.model_types]

ROWS = {
    "text": [{"query": "what is said?", "response": "nothing at all"}],
    "image": [
        {"query": "<image>which digit?", "response": "two and seven", "images": ["a.png"]},
        {"query": "<image> or <image>?", "response": "both", "images": ["b.png", "a.png"]},
    ],
    "audio": [
        {"query": "<audio>what do you hear?", "response": "noise", "audios": ["a.wav"]},
        {"query": "<audio> or <audio>?", "response": "one", "audios": ["a.wav", "a.wav"]},
    ],
    "video": [{"query": "<video>what moves?", "response": "all of it", "videos": ["a.gif"]}],
}
PLAN = {"one": ["--stage", "0"], "two": ["--stage", "3", "--nproc", "2"]}
PARTS = {"one": PLAN["one"], "two": [*PLAN["two"], "--chunked-loss"]}


@pytest.fixture(scope="module")
def train(commands, tiny_models, files: Path):
    """`train(kinds, plan)`: for each kind of model and name in the plan, a run with these options. Some of the rows
    have `codes` of speech."""

    def run(kinds, plan, codes=None):
        jobs = []
        for kind in kinds:
            family = family_of({"model_type": kind})
            rows = [row for media in ("text", *family.media) for row in ROWS[media]] * 3
            if codes:
                rows = [row if i % 3 else {**row, "codes": codes} for i, row in enumerate(rows)]
            file = files / f"{kind}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            fixed = "--max-steps 3 --global-batch-size 4 --per-device-batch-size 1 --lr-scheduler constant --workers 0"
            argv = ["sft", "--model", str(tiny_models(kind)), "--dataset", str(file), "--output-dir", "OUT"]
            argv += ["--learning-rate", "3e-3", *fixed.split()]
            jobs += [(f"{kind}-{name}", [*argv, *more]) for name, more in plan.items()]
        return commands(jobs)

    return run


def check_equal(done, kind: str, most: float = 8.0) -> None:
    one, two = done[f"{kind}-one"], done[f"{kind}-two"]
    assert (one.code, two.code) == (0, 0), one.output + two.output
    assert one.series("loss")[-1] < one.series("loss")[0] < most  # a mean over tokens: the vocabulary has some 300
    assert two.series("loss") == pytest.approx(one.series("loss"), abs=2e-5)
    assert two.series("grad_norm") == pytest.approx(one.series("grad_norm"), rel=1e-4)
    assert two.series("tokens") == one.series("tokens")


@pytest.fixture(scope="module")
def trained(train):
    return train([*MEDIA, *WORDS], PLAN)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*MEDIA, *WORDS])
def test_every_family(trained, kind: str) -> None:
    check_equal(trained, kind)


@pytest.fixture(scope="module")
def in_parts(train):
    return train(MEDIA, PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MEDIA)
def test_the_loss_in_parts_of_every_family_with_files(in_parts, kind: str) -> None:
    check_equal(in_parts, kind)


def weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.slow
def test_the_talker_of_qwen3_omni_is_kept_or_left_out(train, tiny_models) -> None:
    import transformers

    two = ["--nproc", "2", "--enable-audio-output"]
    kept, silent, wrong = train(
        [OMNI], {"kept": [*two, "1"], "silent": [*two, "0"], "wrong": ["--train-parts", "talker"]}, codes=[1, 2]
    ).values()
    assert (kept.code, silent.code) == (0, 0), kept.output + silent.output
    start, found = weights(tiny_models(OMNI)), weights(kept.folder / "model")
    assert start.keys() == found.keys()
    changed = {name.split(".")[0] for name, value in found.items() if not value.equal(start[name])}
    assert changed == {"thinker"}
    loaded = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(kept.folder / "model")
    assert loaded.has_talker
    assert {name.split(".")[0] for name in weights(silent.folder / "model")} == {"thinker"}
    loaded = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(silent.folder / "model")
    assert not hasattr(loaded, "talker")
    assert wrong.code == 2
    assert "'codes' holds one code after the other, but the talker expects groups of 3 codes" in wrong.output


@pytest.mark.slow
def test_the_talker_of_qwen3_omni_learns(train, tiny_models) -> None:
    """Ranks whose rows have no codes do not run it."""
    learning = ["--train-parts", "thinker,talker"]
    plan = {name: [*options, *learning] for name, options in PLAN.items()}
    done = train([OMNI], plan, codes=[[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    check_equal(done, OMNI, 12.0)  # and the loss of the codes beside it
    start, found = weights(tiny_models(OMNI)), weights(done[f"{OMNI}-two"].folder / "model")
    changed = {name.split(".")[0] for name, value in found.items() if not value.equal(start[name])}
    assert changed == {"thinker", "talker"}  # and what turns codes into sound is as it was
