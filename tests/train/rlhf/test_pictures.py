"""Preferences and rewards for answers about pictures: read by TRL's own support for them, sharded by our engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardproof.errors import ConfigError, DataError
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.rlhf.pictured_batches import collator_for
from shardproof.train.rlhf.pictures import ANSWERED
from shardproof.train.run import recipe_of
from train.rlhf.algorithms import patches_valued, pixels_seen, prepared_for, series_of
from train.rlhf.test_resume import check_that_it_goes_on
from train.rlhf.test_same_losses import CHANCE, CHECKPOINTED, STAGES
from train.rlhf.vllm_of_transformers import found, pictures_given

PAIRS: list[dict[str, Any]] = [
    {"query": "<image>which digit?", "response": "two", "rejected_response": "no idea", "images": ["a.png"]},
    {"query": "which digit?", "response": "none that I see", "rejected_response": "nine"},
    {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "image": "b.png"}, " or ", {"type": "image", "image": "a.png"}],
            },
            {"role": "assistant", "content": "both"},
        ],
        "rejected_response": "neither of the two",
    },
    {
        "prompt": [{"role": "user", "content": "<image>?"}],
        "chosen": [{"role": "assistant", "content": "seven"}],
        "rejected": [{"role": "assistant", "content": "eight or more"}],
        "images": ["b.png"],
    },
]
CHAT = {name: value for name, value in PAIRS[0].items() if not name.startswith("rejected")}
JUDGED: list[dict[str, Any]] = [
    {**{name: value for name, value in PAIRS[i].items() if not name.startswith("rejected")}, "label": i % 2 == 0}
    for i in range(3)
]
PROMPTS: list[dict[str, Any]] = [
    {"query": "<image>which digit?", "solution": "#### 7", "images": ["a.png"]},
    {"query": "which digit is it?", "solution": "#### 1"},
    {
        "messages": [{"role": "user", "content": "<image> or <image>?"}],
        "solution": "#### 2",
        "images": ["b.png", "a.png"],
    },
]


@pytest.fixture(scope="session")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures, and rows about one of them, two, or none in `pairs.jsonl` and its like."""
    import numpy as np
    from PIL import Image

    folder, chance = tmp_path_factory.mktemp("pictured"), np.random.default_rng(0)
    for name, size in (("a.png", (16, 24, 3)), ("b.png", (16, 40, 3))):
        Image.fromarray(chance.integers(0, 255, size, dtype=np.uint8)).save(folder / name)
    chats = [{name: value for name, value in row.items() if name != "rejected_response"} for row in PAIRS[:3]]
    for name, rows in (("pairs", PAIRS * 3), ("judged", JUDGED * 4), ("prompts", PROMPTS * 4), ("chats", chats * 4)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="session")
def seeing(tiny_models: Any) -> Path:
    return with_ends(tiny_models("qwen2_5_vl"))


@pytest.fixture(scope="session")
def slicing(tiny_models: Any) -> Path:
    return with_ends(tiny_models("minicpmv4_6"))


def with_ends(folder: Path) -> Path:
    """Some of the model's tokens end an answer, so that answers end in different places."""
    from transformers import GenerationConfig

    generation = GenerationConfig.from_pretrained(folder)
    if isinstance(generation.eos_token_id, int):
        generation.eos_token_id = [generation.eos_token_id, *range(20, 60)]
        generation.save_pretrained(folder)
    return folder


def options(kind: str, pictured: Path, seeing: Path) -> list[str]:
    common = f"--model {seeing} --max-steps 3 --learning-rate 1e-3 --lr-scheduler constant --warmup-ratio 0 --workers 0"
    if kind in ANSWERED:
        file = pictured / {"kto": "judged.jsonl", "gkd": "chats.jsonl"}.get(kind, "pairs.jsonl")
        return [*common.split(), "--rlhf-type", kind, "--dataset", str(file), *taught(kind, seeing)]
    groups = "" if kind == "ppo" else "--num-generations 2"
    generated = f"{groups} --max-completion-length 6 --temperature 4 --beta 0.1 --reward-funcs {CHANCE}"
    return [*common.split(), "--rlhf-type", kind, "--dataset", str(pictured / "prompts.jsonl"), *generated.split()]


def taught(kind: str, pupil: Path) -> list[str]:
    """With a teacher whose weights are others."""
    if kind != "gkd":
        return []
    teacher = pupil.with_name(f"{pupil.name}-teacher")
    if not teacher.exists():
        from shardproof.models.loading.classes import load_pretrained

        model = load_pretrained(str(shutil.copytree(pupil, teacher)))
        for parameter in model.parameters():
            parameter.data += 0.3 * parameter.data.roll(1, -1)
        model.save_pretrained(teacher)
    return ["--teacher-model", str(teacher), "--lmbda", "0"]


def check(rlhf: Any, argv: list[str], variants: list[dict[str, Any]], **more: Any) -> None:
    one = {"stage": 0, "per_device_batch_size": 2, "gradient_accumulation_steps": 2, **more}
    if argv[argv.index("--rlhf-type") + 1] == "kto":
        one |= {"per_device_batch_size": 4, "gradient_accumulation_steps": 1}
    (expected,) = rlhf(1, [one], *argv)
    two = [{"per_device_batch_size": 2, **variant, **more} for variant in variants]
    for variant, got in zip(two, rlhf(2, two, *argv), strict=True):
        answers = [[reward for record in records for reward in record["answers"]] for records in (got, expected)]
        assert answers[0] == pytest.approx(answers[1], rel=1e-4), f"{variant}: other answers were drawn"
        for key, near in (("loss", {"abs": 1e-5}), ("grad_norm", {"rel": 2e-4, "abs": 1e-6})):
            assert [r[key] for r in got] == pytest.approx([r[key] for r in expected], **near), f"{key}: {variant}"
    assert len(expected) == 3
    assert all(record["grad_norm"] > 1e-3 for record in expected), expected


def test_stage_3_gives_the_losses_of_one_process(rlhf: Any, pictured: Path, seeing: Path) -> None:
    check(rlhf, options("grpo", pictured, seeing), STAGES[3:])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "kto", "orpo", "cpo", "simpo", "rm", "grpo", "ppo", "gkd"])
def test_so_does_every_stage(rlhf: Any, pictured: Path, seeing: Path, kind: str) -> None:
    check(rlhf, options(kind, pictured, seeing), STAGES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "grpo",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dpo", "kto", "rm", "rloo", "ppo", "orpo", "gkd")),
    ],
)
def test_so_it_does_of_pictures_in_slices(rlhf: Any, pictured: Path, slicing: Path, kind: str) -> None:
    """MiniCPM-V, whose pictures TRL's trainers cannot deal out themselves."""
    check(rlhf, options(kind, pictured, slicing), [STAGES[3]])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "kto", "orpo", "rm", "grpo", "gkd"])
def test_so_it_does_where_ranks_share_rows(rlhf: Any, pictured: Path, seeing: Path, kind: str) -> None:
    four = {"per_device_batch_size": 4} if kind == "kto" else {"gradient_accumulation_steps": 2}
    check(rlhf, options(kind, pictured, seeing), [{"stage": 3, "sequence_parallel": 2, **four}])


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["kto", *(pytest.param(k, marks=pytest.mark.slow) for k in ("dpo", "orpo", "rm", "gkd"))]
)
def test_an_evaluation_whose_pictures_are_on_one_rank(rlhf: Any, pictured: Path, seeing: Path, kind: str) -> None:
    """The other is through earlier, and lends its slices until all are."""
    text, *seen = (JUDGED[1], JUDGED[0], JUDGED[2]) if kind == "kto" else (PAIRS[1], PAIRS[0], PAIRS[2])
    rows = [*[text] * 6, *seen]  # by twos: those of the second rank are the last
    file = pictured / f"{kind}-held.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = [*options(kind, pictured, seeing), "--val-dataset", str(file)]
    shape = {"max_steps": 1, "per_device_batch_size": 2}
    (one,) = rlhf(1, [{**shape, "gradient_accumulation_steps": 2}], *argv)
    (two,) = rlhf(2, [{**shape, "stage": 3}], *argv)
    held = [[record["eval_loss"] for record in records if "eval_loss" in record] for records in (one, two)]
    if kind == "kto":  # whose steps are of all rows of a micro-batch
        assert [len(some) for some in held] == [1, 1]
    else:
        assert held[1] == pytest.approx(held[0], abs=1e-5)


def logps(model: Any, processor: Any, pictured: Path, row: dict[str, Any], answer: str) -> tuple[Any, Any]:
    """The logarithms of the probabilities of a row's tokens, and which of them are of the answer; those that stand for
    files or begin them are left out."""
    import torch
    from PIL import Image

    from shardproof.train.rlhf.pictures import marks_of

    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "which digit?"}]}]
    said = [*asked, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]
    before = processor.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    whole = processor.apply_chat_template(said, tokenize=False)
    pictures = [Image.open(pictured / name).convert("RGB") for name in row["images"]]
    made, start = (processor(text=[t], images=[pictures], return_tensors="pt") for t in (whole, before))
    with torch.no_grad():
        logits = model(**made).logits[0, :-1]
    ids = made["input_ids"][0, 1:]
    words = ~torch.isin(ids, torch.tensor(marks_of(processor, model)))
    answers = torch.arange(len(ids)) >= start["input_ids"].shape[1] - 1
    found = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    return found[words], answers[words]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["orpo", "cpo", "simpo"])
def test_losses_of_pairs_are_those_of_the_papers(
    rlhf: Any, tmp_path: Path, pictured: Path, seeing: Path, kind: str
) -> None:
    import torch
    from torch.nn.functional import logsigmoid

    from shardproof.models.loading.classes import load_pretrained
    from shardproof.models.loading.processors import load_processor

    model, processor = load_pretrained(str(seeing)).eval(), load_processor(str(seeing))
    answers = ("two", "no idea")
    (better, learnt), (worse, also) = (logps(model, processor, pictured, PAIRS[0], answer) for answer in answers)
    if kind == "orpo":
        chosen, rejected = better[learnt].mean(), worse[also].mean()
        odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
        expected = -better.mean() - 0.1 * logsigmoid(odds)
    elif kind == "cpo":
        expected = -logsigmoid(0.1 * (better[learnt].sum() - worse[also].sum())) - better[learnt].mean()
    else:
        expected = -logsigmoid(2.0 * (better[learnt].mean() - worse[also].mean()) - 0.5)
    (tmp_path / "pairs.jsonl").write_text(json.dumps({**PAIRS[0], "images": [str(pictured / "a.png")]}) + "\n")
    shape = {"max_steps": 1, "per_device_batch_size": 1}
    ((first,),) = rlhf(1, [shape], *options(kind, tmp_path, seeing), "--media-root", str(pictured))
    assert first["loss"] == pytest.approx(float(expected), rel=1e-4)


@pytest.fixture(scope="module")
def judging(tmp_path_factory: pytest.TempPathFactory, seeing: Path) -> Path:
    """A model that rewards, and tells pictures and answers apart."""
    import torch

    from shardproof.models.scorers import load_scorer

    folder = shutil.copytree(seeing, tmp_path_factory.mktemp("judging") / "judge")
    model = load_scorer(str(folder), num_labels=1)
    with torch.no_grad():
        model.score.weight.copy_(torch.linspace(-1, 1, model.score.weight.numel())[None])
    model.save_pretrained(folder)
    return folder


def rewards_of(judge: Path, pictured: Path, answers: list[str]) -> list[float]:
    """Of answers to the first row of PAIRS."""
    import torch
    from PIL import Image

    from shardproof.models.loading.processors import load_processor
    from shardproof.models.scorers import load_scorer

    model, processor = load_scorer(str(judge)).eval(), load_processor(str(judge))
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "which digit?"}]}]
    picture, found = Image.open(pictured / "a.png").convert("RGB"), []
    for answer in answers:
        said = [*asked, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]
        text = processor.apply_chat_template(said, tokenize=False)
        with torch.no_grad():
            found.append(float(model(**processor(text=[text], images=[[picture]], return_tensors="pt")).logits))
    return found


def test_a_reward_is_that_of_the_whole_conversation(rlhf: Any, tmp_path: Path, pictured: Path, judging: Path) -> None:
    import torch

    better, worse = rewards_of(judging, pictured, ["two", "no idea"])
    expected = -torch.nn.functional.logsigmoid(torch.tensor(better - worse))
    (tmp_path / "pairs.jsonl").write_text(json.dumps({**PAIRS[0], "images": [str(pictured / "a.png")]}) + "\n")
    argv = [*options("rm", tmp_path, judging), "--media-root", str(pictured)]
    ((first,),) = rlhf(1, [{"max_steps": 1, "per_device_batch_size": 1}], *argv)
    assert first["loss"] == pytest.approx(float(expected), rel=1e-4)
    assert abs(better - worse) > 0.01


def judged_by(judge: Path, argv: list[str]) -> list[str]:
    """With a reward model in place of the functions."""
    return [*argv[: argv.index("--reward-funcs")], "--reward-model", str(judge)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=pytest.mark.slow)])
def test_a_reward_model_sees_what_is_judged(
    rlhf: Any, pictured: Path, seeing: Path, judging: Path, kind: str, tmp_path: Path
) -> None:
    check(rlhf, judged_by(judging, options(kind, pictured, seeing)), [STAGES[0], STAGES[3]])


def test_it_gives_the_rewards_that_it_gives_alone(
    pools: Any, pictured: Path, seeing: Path, judging: Path, tmp_path: Path
) -> None:
    row = {"query": PAIRS[0]["query"], "images": [str(pictured / "a.png")]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    argv = [*judged_by(judging, options("grpo", tmp_path, seeing)), "--media-root", str(pictured), "--log-completions"]
    (found,) = prepared_for(argv, 1, [{"max_steps": 1, "per_device_batch_size": 2}], tmp_path)
    pools.run(1, series_of, [found], timeout=200.0)
    lines = [json.loads(line) for line in (found.folder / "completions.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    expected = rewards_of(judging, pictured, [line["completion"][0]["content"] for line in lines])
    assert [line["rewards"]["judge"] for line in lines] == pytest.approx(expected, rel=1e-4)


def test_of_an_answer_about_pictures_gkd_learns_what_sft_learns(pictured: Path, seeing: Path, tmp_path: Path) -> None:
    """And not the line end that a template writes behind it."""
    argv = options("gkd", pictured, seeing)
    (run,) = prepared_for(argv, 1, [{"max_steps": 1}], tmp_path)
    examples = [run.rows[i] for i in range(3)]
    encoder = run.rows.format["format_kwargs"]["transform"].encoder
    config = RlhfConfig(dataset=[str(pictured / "chats.jsonl")], rlhf_type="gkd")
    rows, _ = recipe_of(config).read(config)
    batch = collator_for(run.rows, "gkd", None)(examples)
    for i, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        sft = encoder.encode(rows[i])
        assert [int(token) for token in labels if token != -100] == [token for token in sft[1] if token != -100]
        whole = ids[(batch["attention_mask"][i] == 1).nonzero()[:, 0]].tolist()
        assert whole == list(sft[0])
        assert sft[1][-1] == -100, "the template writes nothing behind an answer"


@pytest.mark.slow
def test_a_teachers_likeliest_tokens_are_learnt_of_pictures(rlhf: Any, pictured: Path, seeing: Path) -> None:
    argv = options("gkd", pictured, seeing)
    check(rlhf, argv, [{"stage": 3, "gradient_checkpointing": True}, {"stage": 2}], gkd_logits_topk=8)
    shape = {"stage": 3, "per_device_batch_size": 2}
    from transformers import AutoConfig

    tokens = AutoConfig.from_pretrained(seeing).get_text_config().vocab_size
    whole, every = rlhf(2, [shape, {**shape, "gkd_logits_topk": tokens}], *argv)
    for key in ("loss", "grad_norm"):
        assert [r[key] for r in every] == pytest.approx([r[key] for r in whole], rel=1e-4), key


@pytest.mark.slow
@pytest.mark.parametrize("who", [pytest.param("pupil", marks=pytest.mark.slow), "teacher"])
def test_what_is_written_about_pictures_is_learnt_from(rlhf: Any, pictured: Path, seeing: Path, who: str) -> None:
    """Answers of the pupil itself, or of its teacher, by the most probable tokens: the same on any number of ranks."""
    argv = [*options("gkd", pictured, seeing), "--max-completion-length", "6", "--temperature", "1e-4"]
    how = {"lmbda": float(who == "pupil"), "seq_kd": who == "teacher", "gradient_accumulation_steps": 1}
    (one,) = rlhf(1, [{**how, "per_device_batch_size": 4}], *argv)
    (two,) = rlhf(2, [{**how, "per_device_batch_size": 2, "stage": 3}], *argv)
    for key in ("loss", "grad_norm"):
        assert [r[key] for r in two] == pytest.approx([r[key] for r in one], rel=2e-4), key
    assert all(record["grad_norm"] > 1e-3 for record in one)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gkd", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ANSWERED[:-1])])
@pytest.mark.parametrize("seen", [0, 1])
def test_pictures_in_the_rows_to_train_on_alone_or_in_the_others(
    rlhf: Any, tmp_path: Path, pictured: Path, seeing: Path, kind: str, seen: int
) -> None:
    """Either may be of text alone, as rows may be that were split off."""
    rows = JUDGED if kind == "kto" else PAIRS[:1] + PAIRS[2:] + PAIRS[1:2]
    text, others = [row for row in rows if "image" not in str(row)], [row for row in rows if "image" in str(row)]
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, some in zip(files, (text, others) if seen else (others, text), strict=True):
        some = [{n: v for n, v in row.items() if kind != "gkd" or n not in ("rejected_response",)} for row in some]
        some = [row for row in some if kind != "gkd" or "chosen" not in row]
        file.write_text("".join(json.dumps(row) + "\n" for row in some * 4))
    argv = [*options(kind, pictured, seeing), "--media-root", str(pictured), "--val-dataset", str(files[1])]
    argv[argv.index("--dataset") + 1] = str(files[0])
    (records,) = rlhf(1, [{"max_steps": 1}], *argv)
    assert any("eval_loss" in record for record in records)


@pytest.fixture(scope="session")
def hearing(tiny_models: Any) -> Path:
    return with_ends(tiny_models("qwen2_5_omni"))


@pytest.fixture(scope="session")
def heard(pictured: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with sounds, and few with pictures, so that of two ranks often one has none."""
    import numpy as np
    import soundfile

    folder = tmp_path_factory.mktemp("heard")
    shutil.copytree(pictured, folder, dirs_exist_ok=True)
    for name, length in (("a.wav", 4000), ("b.wav", 9000)):
        soundfile.write(folder / name, np.sin(np.arange(length) / 5).astype("float32"), 16000)
    sound = {"query": "<audio>what is it?", "response": "a tone", "rejected_response": "no idea", "audios": ["a.wav"]}
    both = {**sound, "query": "<image><audio>and?", "images": ["b.png"]}
    good = {"query": sound["query"], "response": "a tone", "audios": ["a.wav"], "label": True}
    told = {"query": "which digit is it?", "solution": "#### 1"}
    asked = {"query": "<audio>what is it?", "solution": "#### 2", "audios": ["a.wav"]}
    longer = {**asked, "query": "<image><audio>or <audio>?", "audios": ["a.wav", "b.wav"], "images": ["b.png"]}
    judged = [good, {**good, "response": "no idea", "label": False}, *JUDGED[:2]]
    for name, rows in (
        ("pairs", [sound, both, *PAIRS[:2]] * 3),
        ("chats", [{**row, "rejected_response": None} for row in [sound, both, *PAIRS[:2]] * 3]),
        ("judged", judged * 3),
        ("prompts", [PROMPTS[0], told, longer, asked] * 3),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["grpo", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dpo", "gkd", "kto", "rloo"))]
)
def test_so_it_does_of_an_omni_model(rlhf: Any, heard: Path, hearing: Path, kind: str) -> None:
    """Whose base model is its thinker's; pairs have sounds, too."""
    check(rlhf, options(kind, heard, hearing), [STAGES[3]])


@pytest.mark.slow
def test_so_it_does_of_videos(rlhf: Any, heard: Path, hearing: Path) -> None:
    """Which are lists that nobody may make anew."""
    from PIL import Image

    pictures = [Image.new("RGB", (24, 16), (40 * i, 0, 0)) for i in range(4)]
    pictures[0].save(heard / "a.gif", save_all=True, append_images=pictures[1:])
    asked = {"query": "<video>what happens?", "videos": ["a.gif"]}
    (heard / "prompts-of-videos.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [asked, {"query": "?"}] * 4))
    argv = [*options("grpo", heard, hearing), "--max-pixels", "3136"]
    argv[argv.index("--dataset") + 1] = str(heard / "prompts-of-videos.jsonl")
    check(rlhf, argv, [STAGES[3]])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "kto", "grpo", "ppo", "cpo", "rm", "gkd"])
def test_so_it_does_of_an_omni_model_at_every_stage(rlhf: Any, heard: Path, hearing: Path, kind: str) -> None:
    check(rlhf, options(kind, heard, hearing), [*STAGES, *CHECKPOINTED])
    check(rlhf, options(kind, heard, hearing), [STAGES[3], *CHECKPOINTED], tuner="lora", lora_rank=4)


def test_what_is_heard_reaches_the_model(tmp_path: Path, heard: Path, hearing: Path) -> None:
    """The batch of TRL's collator has what the processor makes of sounds, for chosen and rejected."""
    from shardproof.train.rlhf.pictured_batches import collator_for

    argv = ["--model", str(hearing), "--rlhf-type", "dpo", "--media-root", str(heard)]
    rows = [json.loads(line) for line in (heard / "pairs.jsonl").read_text().splitlines()[:4]]
    dataset = prepared(tmp_path, rows, *argv).rows
    batch = collator_for(dataset, "dpo", 2048)([dataset[i] for i in range(4)])
    assert len(batch["input_features"]) == len(batch["feature_attention_mask"]) == 4
    assert len(batch["image_grid_thw"]) == 4
    sounds = batch["input_ids"] == dataset.format["format_kwargs"][
        "transform"
    ].encoder.processor.tokenizer.convert_tokens_to_ids("<|AUDIO|>")
    assert sounds.any(1).tolist() == [True, True, False, False] * 2


def test_answers_to_compare_with_come_from_the_rows_of_all_ranks(tmp_path: Path, pictured: Path, seeing: Path) -> None:
    """Of one rank they are those of TRL's collator."""
    import torch
    from trl.trainer.kto_trainer import DataCollatorForVisionUnpairedPreference

    from shardproof.train.rlhf.pictured_batches import collator_for
    from shardproof.train.rlhf.pictures import FILES, with_others

    argv = ["--model", str(seeing), "--rlhf-type", "kto", "--media-root", str(pictured)]
    rows = prepared(tmp_path, [*JUDGED, {**JUDGED[0], "response": "two or three"}], *argv).rows
    theirs = DataCollatorForVisionUnpairedPreference(rows.format["format_kwargs"]["transform"].encoder.processor, 2048)
    plain = [rows[i] for i in range(4)]
    assert all(example.pop(FILES).by_kind["image"] == example["images"] for example in plain)
    expected = theirs.torch_call(plain)

    together, ours = with_others(rows, 4), collator_for(rows, "kto", 2048)
    got = ours([together[i] for i in range(4)])
    assert {name for name in got if name.startswith("KL_")} == {name for name in expected if name.startswith("KL_")}
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    for i in range(4):  # as on four ranks
        alone = ours([together[i]])
        for name in ("input_ids", "KL_input_ids"):
            mask = name.replace("input_ids", "attention_mask")
            assert torch.equal(alone[name][alone[mask] == 1], expected[name][i][expected[mask][i] == 1])
    assert not any(name.startswith("KL_") for name in ours([rows[0], rows[1]]))


@pytest.mark.parametrize("kind", ["kto", "gkd"])
def test_a_batch_of_what_the_processor_takes_row_by_row_only(tmp_path: Path, tiny_models: Any, kind: str) -> None:
    """InternVL's takes no videos of different numbers of frames together."""
    import torch
    from PIL import Image

    from shardproof.train.rlhf.pictured_batches import BESIDE, collator_for

    for frames in (2, 3):
        pictures = [Image.new("RGB", (24, 16), (40 * i, 0, 0)) for i in range(frames)]
        pictures[0].save(tmp_path / f"{frames}.gif", save_all=True, append_images=pictures[1:])
    judged = {"label": True} if kind == "kto" else {}
    seen = [{"query": "<video>?", "response": "it " * n, "videos": [f"{n}.gif"]} for n in (2, 3)]
    rows = [{**row, **judged} for row in (*seen, {"query": "what else?", "response": "nothing"})]
    model = str(tiny_models("internvl"))
    teacher = ["--teacher-model", model] if kind == "gkd" else []
    dataset = prepared(tmp_path, rows, "--model", model, "--rlhf-type", kind, *teacher).rows
    collate = collator_for(dataset, kind, 2048)
    pad = dataset.format["format_kwargs"]["transform"].encoder.processor.tokenizer.pad_token_id
    together, *alone = (
        (made := collate([dataset[i] for i in some])) | made.get(BESIDE, {}) for some in ([0, 1, 2], [0], [1], [2])
    )
    pixels = [made["pixel_values"] for made in alone if "pixel_values" in made]
    assert len(pixels) == 2
    assert torch.equal(together["pixel_values"], torch.cat(pixels))
    for i, made in enumerate(alone):
        ids = together["input_ids"][i]
        assert ids[ids != pad].tolist() == made["input_ids"][0][made["input_ids"][0] != pad].tolist()


@pytest.mark.parametrize(
    ("name", "marks"),
    [
        ("qwen2_5_vl", {"<|image_pad|>", "<|video_pad|>", "<|vision_start|>"}),
        ("qwen2_5_omni", {"<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>", "<|vision_bos|>", "<|audio_bos|>"}),
    ],
)
def test_no_answer_holds_what_stands_for_files_or_begins_them(tiny_models: Any, name: str, marks: set[str]) -> None:
    from transformers import AutoConfig

    from shardproof.models.loading.processors import load_processor
    from shardproof.train.rlhf.pictures import marks_of

    processing, config = load_processor(tiny_models(name)), AutoConfig.from_pretrained(tiny_models(name))
    thinker = getattr(config, "thinker_config", config)
    found = marks_of(processing, SimpleNamespace(config=thinker))
    assert set(processing.tokenizer.convert_ids_to_tokens(found)) == marks


@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_states_before_the_head_are_those_of_its_logits(tiny_models: Any, name: str) -> None:
    import torch

    from shardproof.models.loading.classes import load_pretrained

    model = load_pretrained(str(tiny_models(name))).eval()
    ids = torch.arange(4, 20)[None]
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    assert torch.equal(model.get_output_embeddings()(states), model(input_ids=ids, use_cache=False).logits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "kto", "orpo", "gkd", "grpo"])
@pytest.mark.parametrize("name", ["qwen3_omni_moe", "qwen2_audio", "qwen3_vl", "gemma3", "internvl", "llava"])
def test_so_it_does_of_other_families(
    rlhf: Any, heard: Path, pictured: Path, tiny_models: Any, tmp_path: Path, name: str, kind: str
) -> None:
    rows = heard if name in ("qwen3_omni_moe", "qwen2_audio") else pictured
    if name == "qwen2_audio":
        rows = Path(shutil.copytree(heard, tmp_path / "sounds"))
        for file in rows.glob("*.jsonl"):
            lines = file.read_text().splitlines(keepends=True)
            file.write_text("".join(line for line in lines if "image" not in line))
    check(rlhf, options(kind, rows, with_ends(tiny_models(name))), [STAGES[3]])


@pytest.mark.slow
def test_so_it_does_of_slices_at_every_stage(rlhf: Any, pictured: Path, slicing: Path) -> None:
    check(rlhf, options("grpo", pictured, slicing), [*STAGES, *CHECKPOINTED])
    check(rlhf, options("grpo", pictured, slicing), [STAGES[3], *CHECKPOINTED], tuner="lora", lora_rank=4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "kto", "grpo", "rloo", "orpo", "simpo", "gkd"])
def test_so_they_do_with_checkpointing_and_adapters(rlhf: Any, pictured: Path, seeing: Path, kind: str) -> None:
    check(rlhf, options(kind, pictured, seeing), CHECKPOINTED)
    check(rlhf, options(kind, pictured, seeing), [*STAGES, *CHECKPOINTED], tuner="lora", lora_rank=4)


@pytest.mark.slow
def test_answers_about_files_are_still_learnt_from_after_a_checkpoint(
    commands: Any, heard: Path, hearing: Path, tmp_path: Path
) -> None:
    """Whose rows are read again."""
    more = "--num-generations 2 --max-completion-length 6 --reward-funcs length --steps-per-generation 2 --beta 0.04"
    argv = f"rlhf --rlhf-type grpo --model {hearing} --dataset {heard / 'prompts.jsonl'} {more} --nproc 2 --stage 3"
    check_that_it_goes_on(commands, [*argv.split(), "--per-device-batch-size", "2"], 3, 5, tmp_path)


def prepared(tmp_path: Path, rows: list[dict[str, Any]], *argv: str) -> Any:
    from shardproof.cli import training
    from shardproof.train.options.rlhf_config import RlhfConfig
    from shardproof.train.rlhf import recipe as rlhf

    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*argv, "--dataset", str(file), "--output-dir", str(tmp_path / "run")]
    config, _ = training.parse(RlhfConfig, "", words)
    return rlhf.prepare(config, 1, *rlhf.read(config))


def test_an_example_has_the_pictures_of_its_row_and_their_places(tmp_path: Path, pictured: Path, seeing: Path) -> None:
    argv = ["--model", str(seeing), "--rlhf-type", "dpo", "--media-root", str(pictured)]
    dataset = prepared(tmp_path, PAIRS, *argv).rows
    assert [len(example["images"]) for example in dataset] == [1, 0, 2, 1]
    image, text = {"type": "image"}, {"type": "text", "text": " or "}
    assert dataset[2]["prompt"] == [{"role": "user", "content": [image, text, image]}]
    assert dataset[3]["rejected"] == [{"role": "assistant", "content": [{"type": "text", "text": "eight or more"}]}]
    assert dataset[0]["images"][0].size == (24, 16)


def test_a_batch_of_rows_without_a_column_has_it(tmp_path: Path, pictured: Path, seeing: Path) -> None:
    """A reward that wants it would end the run in its midst."""
    argv = ["--model", str(seeing), "--rlhf-type", "grpo", "--media-root", str(pictured), "--reward-funcs", "accuracy"]
    rows = [{"query": "<image>which digit?", "images": ["a.png"]}] * 3 + [PROMPTS[0]]
    dataset = prepared(tmp_path, rows, *argv, "--per-device-batch-size", "8").rows
    assert [example["solution"] for example in dataset] == [None, None, None, "#### 7"]


def test_an_example_has_objects_as_the_model_writes_them(tmp_path: Path, pictured: Path, seeing: Path) -> None:
    """And a picture that has become too small for its box is lost."""
    own = Path(shutil.copytree(pictured, tmp_path / "own"))
    box = {**PAIRS[0], "query": "<image>find <ref-object>", "response": "<bbox>"}
    box["objects"] = {"ref": ["it"], "bbox": [[3, 4, 24, 16]]}
    argv = ["--model", str(seeing), "--rlhf-type", "dpo", "--media-root", str(own)]
    dataset = prepared(tmp_path, [box, PAIRS[1]], *argv).rows
    said = {turn: dataset[0][turn][0]["content"][-1]["text"] for turn in ("prompt", "chosen", "rejected")}
    assert said == {
        "prompt": "find <|object_ref_start|>it<|object_ref_end|>",
        "chosen": "<|box_start|>(3,4),(24,16)<|box_end|>",
        "rejected": "no idea",
    }
    assert dataset[0]["prompt"][0].keys() == {"role", "content"}
    dataset[0]["images"][0].crop((0, 0, 16, 16)).save(own / "a.png")
    assert [len(example["images"]) for example in dataset] == [0, 0]


def test_a_file_that_is_lost_later_does_not_end_the_run(tmp_path: Path, pictured: Path, seeing: Path, caplog) -> None:
    """Unless that is asked for: another row takes the place of its row."""
    own = Path(shutil.copytree(pictured, tmp_path / "own"))
    argv = ["--model", str(seeing), "--rlhf-type", "dpo", "--media-root", str(own)]
    skips = prepared(tmp_path, PAIRS, *argv).rows
    (tmp_path / "strict").mkdir()
    stops = prepared(tmp_path / "strict", PAIRS, *argv, "--lost-files", "stop").rows
    (own / "b.png").write_bytes(b"no picture any more")
    assert [len(example["images"]) for example in skips] == [1, 0, 1, 1]  # the last two rows are the first one now
    assert "rows.jsonl:3 is left out of its step, and another row takes its place: image 1 (b.png)" in caplog.text
    with pytest.raises(DataError, match=r"rows.jsonl:3: image 1 \(b.png\): not a readable image"):
        stops[2]
    (own / "a.png").unlink()
    assert [len(example["images"]) for example in skips] == [0] * 4


@pytest.mark.parametrize(
    "row, said, argv",
    [
        ({**PAIRS[0], "images": ["none.png"]}, r"rows.jsonl:1: image 1 \(none.png\): there is no such file", []),
        ({**PAIRS[0], "images": ["a.png", "b.png"]}, "1 place for image", []),
        ({**PAIRS[0], "audios": ["a.wav"]}, "it has a file of type audio, but the model takes image, video", []),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "images": ["a.png"]},
            "'images' appears along with plain text",
            [],
        ),
        (PAIRS[0], "--precompute-ref", ["--precompute-ref"]),
        (CHAT, "is a text model, but these rows have files", ["--rlhf-type", "gkd", "--teacher-model", "TEXT"]),
        (PAIRS[0], "is a text model", ["--model", "tiny"]),
        (PAIRS[0], "Every row is longer than --max-length 8", ["--max-length", "8"]),
    ],
)
def test_what_cannot_be_trained_on_is_told_before(
    tmp_path: Path, pictured: Path, seeing: Path, models: Any, row: dict[str, Any], said: str, argv: list[str]
) -> None:
    argv = [str(models["other"]) if word == "TEXT" else word for word in argv]
    model = [] if "--model" in argv else ["--model", str(seeing)]
    with pytest.raises((ConfigError, DataError), match=said):
        prepared(tmp_path, [row], *model, "--media-root", str(pictured), *argv)


def test_a_teacher_that_reads_files_otherwise_is_told_before(
    tmp_path: Path, pictured: Path, seeing: Path, tiny_models: Any
) -> None:
    said = "has a Qwen3VLProcessor, and .* a Qwen2_5_VLProcessor. .* use a model of the same family"
    argv = ["--rlhf-type", "gkd", "--teacher-model", str(tiny_models("qwen3_vl")), "--media-root", str(pictured)]
    with pytest.raises(ConfigError, match=said):
        prepared(tmp_path, [CHAT], "--model", str(seeing), *argv)


def test_a_model_whose_towers_are_apart_is_told_before_it_trains(tiny_models: Any, seeing: Path) -> None:
    from shardproof.models.loading.classes import check_one_backbone, load_pretrained

    for name in ("qwen2_5_vl", "minicpmv4_6", "qwen2_5_omni", "qwen2_audio"):
        check_one_backbone(load_pretrained(str(tiny_models(name))), "TRL")
    with pytest.raises(ConfigError, match="keeps them apart"):
        check_one_backbone(load_pretrained(str(tiny_models("qwen2_5_vl"))).model, "TRL")


def test_values_are_of_the_pictures_that_answers_are_about(
    pools: Any, tmp_path: Path, pictured: Path, seeing: Path
) -> None:
    shape = {"max_steps": 2, "per_device_batch_size": 4}
    found = prepared_for(options("ppo", pictured, seeing), 1, [shape], tmp_path)
    asked = pools.run(1, patches_valued, found, timeout=200.0)[0]
    assert len(asked) == 4  # when answers are written, and when they are learnt from
    assert all(given == wanted for given, wanted in asked)
    assert any(wanted for _, wanted in asked)


@pytest.mark.slow
def test_an_evaluation_leaves_files_of_answers_that_are_still_learnt_from(
    pools: Any, tmp_path: Path, pictured: Path, seeing: Path
) -> None:
    """Rows to evaluate on have the same numbers."""
    import torch

    from shardproof.train.rlhf.prompted import Prompted

    held = [{"query": "<image>which?", "solution": "#### 7", "images": [name]} for name in ("b.png", "a.png")] * 6
    (pictured / "prompts-held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))
    argv = [*options("grpo", pictured, seeing), "--val-dataset", str(pictured / "prompts-held.jsonl")]
    shape = {"eval_steps": 1, "steps_per_generation": 2, "per_device_batch_size": 4, "max_steps": 4}
    found = prepared_for(argv, 1, [shape], tmp_path)
    seen = pools.run(1, pixels_seen, found, timeout=200.0)[0]
    for mine, rows in ((True, found[0].rows), (False, found[0].val_rows)):
        calls = [(numbers, pixels) for which, numbers, pixels in seen if which is mine]
        assert len(calls) >= 4
        fresh = Prompted(rows)
        for numbers, pixels in calls:
            made = fresh.given(numbers, 200, 0, torch.device("cpu")).get("pixel_values", torch.zeros(1))
            assert pixels == pytest.approx(float(made.sum()), rel=1e-5), (mine, numbers)


def test_a_file_that_is_lost_before_a_run_goes_on_is_named(tmp_path: Path, pictured: Path, seeing: Path) -> None:
    """Answers about it come from the checkpoint, and another row cannot take its place."""
    import torch

    from shardproof.train.rlhf.prompted import Prompted

    own = Path(shutil.copytree(pictured, tmp_path / "own"))
    argv = ["--model", str(seeing), "--rlhf-type", "grpo", "--media-root", str(own), "--reward-funcs", "length"]
    rows = prepared(tmp_path, PROMPTS * 8, *argv).rows
    (own / "a.png").unlink()
    with pytest.raises(
        DataError, match=r"rows.jsonl:4: a file is missing, and answers about it still have to be learned"
    ):
        Prompted(rows).given([1, 3], 100, 0, torch.device("cpu"))


JUDGE = """
import shardproof

@shardproof.register_reward("sees")
def sees(completions, images, audios, videos, solution, **columns):
    assert audios == videos == [[]] * len(images)
    assert all(answer.startswith("#### ") for answer in solution)
    return [float(sum(picture.width for picture in of_row or [])) for of_row in images]
"""


@pytest.mark.slow
def test_a_reward_of_ones_own_sees_pictures_and_columns(
    commands: Any, tmp_path: Path, pictured: Path, seeing: Path
) -> None:
    """Of a row without pictures it gets none."""
    (tmp_path / "judge.py").write_text(JUDGE)
    fixed = (
        f"rlhf --rlhf-type grpo --model {seeing} --dataset {pictured / 'prompts.jsonl'} --output-dir OUT --workers 0"
    )
    fixed += f" --max-steps 3 --num-generations 2 --max-completion-length 4 --external-plugins {tmp_path / 'judge.py'}"
    argv = [*fixed.split(), "--reward-funcs", "sees", "length"]
    done = commands([("one", [*argv, "--global-batch-size", "4"]), ("two", [*argv, "--nproc", "2", "--stage", "3"])])
    for run in done.values():
        assert run.code == 0, run.output
        lines = [json.loads(line) for line in (run.folder / "completions.jsonl").read_text().splitlines()]
        rewards = {line["rewards"]["sees"] for line in lines}
        assert rewards <= {24.0, 0.0, 64.0}
        assert len(rewards) > 1


@pytest.mark.slow
def test_on_one_process_others_read_the_rows(commands: Any, pictured: Path, seeing: Path) -> None:
    """Processes that are forked where the tokenizer has had threads, as it has by default."""
    argv = [word for word in options("dpo", pictured, seeing) if word not in ("--workers", "0")]
    runs = commands([("dpo", ["rlhf", *argv, "--nproc", "1", "--output-dir", "OUT", "--warmup-ratio", "0"])])
    assert runs["dpo"].code == 0, runs["dpo"].output
    assert len(runs["dpo"].series("loss")) == 3


def test_a_vllm_in_the_processes_sees_the_pictures_of_rows_that_have_some(
    pools: Any, pictured: Path, seeing: Path, tmp_path: Path
) -> None:
    argv = [*options("grpo", pictured, seeing), *"--stage 3 --use-vllm --vllm-mode colocate".split()]
    with found():
        short = {"global_batch_size": 12, "max_steps": 2, "max_completion_length": 2, "beta": 0.0}
        prepared = prepared_for(argv, 2, [short], tmp_path)
    found_by = pools.run(2, pictures_given, prepared, timeout=300.0)
    assert sorted(count for given, _ in found_by for count in given) == [0] * 8 + [1] * 8 + [2] * 8
    config = json.loads((seeing / "config.json").read_text())
    for _, held in found_by:  # behind such a token a model expects a picture
        assert {config[f"{name}_token_id"] for name in ("image", "video")} <= held
