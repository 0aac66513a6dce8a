"""Variables of ms-swift's: each is an option here, or is told; none is lost in silence."""

import shlex

import pytest

from shardproof.cli import infer, sft, swift
from shardproof.errors import ConfigError

SAID = "swift sft --model m --dataset d.jsonl"

# What its page on the command line and its sources name, with values that are not what happens anyway.
ALL = """MAX_PIXELS=1003520 MIN_PIXELS=3136 IMAGE_MAX_TOKEN_NUM=1024 IMAGE_MIN_TOKEN_NUM=16 VIDEO_MAX_PIXELS=50176
VIDEO_MIN_PIXELS=3136 VIDEO_MAX_TOKEN_NUM=128 VIDEO_MIN_TOKEN_NUM=64 VIDEO_TOTAL_PIXELS=90316800 FPS=1 FPS_MAX_FRAMES=12
FPS_MIN_FRAMES=2 NFRAMES=4 MAX_RATIO=100 IMAGE_FACTOR=32 FRAME_FACTOR=4 SPATIAL_MERGE_SIZE=4 QWENVL_BBOX_FORMAT=new
ENABLE_AUDIO_OUTPUT=0 USE_AUDIO_IN_VIDEO=1 SAMPLING_RATE=8000 MAX_NUM=6 INPUT_SIZE=224 VIDEO_MAX_NUM=2 VIDEO_SEGMENTS=4
MAX_SLICE_NUMS=36 VIDEO_MAX_SLICE_NUMS=2 MAX_NUM_FRAMES=32 STACK_FRAMES=3 DOWNSAMPLE_MODE=4x INIT_TTS=true
INIT_AUDIO=false MAX_PARTITION=4 NUM_FRAMES=4 HD_NUM=12 NUM_CROPS=16 N_MELS=80 ROOT_IMAGE_DIR=/data SPEAKER_NAME=Chelsie
REASONING_EFFORT=max THINKING_BUDGET=512 INFONCE_USE_BATCH=false INFONCE_HARD_NEGATIVES=4 INFONCE_MASK_FAKE_NEGATIVE=1
INFONCE_INCLUDE_QQ=true INFONCE_INCLUDE_DD=true LISTWISE_RERANKER_MIN_GROUP_SIZE=3
GENERATIVE_RERANKER_POSITIVE_TOKEN=ja SWIFT_TIMEOUT=60 SWIFT_AUDIO_LOAD_BACKEND=soundfile_pyav VIDEO_LOAD_BACKEND=decord
CELOSS_PARALLEL_SIZE=2 RANDOM_DATASET_RESPONSE=true USE_OPENCOMPASS_EVALUATOR=1 LOG_LEVEL=ERROR SEED_USE_THINKING=false
NPROC_PER_NODE=2 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True ASCEND_RT_VISIBLE_DEVICES=0 MODELSCOPE_CACHE=/c"""


@pytest.mark.parametrize("assigned", ALL.split())
def test_no_variable_is_lost(assigned: str) -> None:
    """In front of a command, or exported above it."""
    plain, *before = swift.translate(SAID)
    for text in (f"{assigned} {SAID}", f"export {assigned}\n{SAID}"):
        command, *after = swift.translate(text)
        told = [line for lines, known in zip(after, before, strict=True) for line in lines if line not in known]
        assert (command == plain) == bool(told), (command, told)
        assert all(assigned in line for line in told)


def test_a_variable_of_the_text_alone_is_not_told() -> None:
    _, notes, _ = swift.translate(f"export MODEL=m\nLR=1e-4\nunused=3\n{SAID} --output_dir $MODEL")
    assert not [note for note in notes if "MODEL" in note or "LR" in note or "unused" in note]


def test_keys_are_not_printed() -> None:
    _, notes, _ = swift.translate(f"WANDB_API_KEY=secret OPENAI_API_KEY=secret {SAID}")
    assert [note.partition(" ")[0] for note in notes if "API" in note] == ["WANDB_API_KEY=...", "OPENAI_API_KEY=..."]
    assert "secret" not in "".join(notes)


def test_model_kwargs_are_these_variables() -> None:
    said = """--model_kwargs '{"fps_max_frames": 12, "MAX_PIXELS": 50176, "fps": 1, "enable_audio_output": false}'"""
    command, _, missing = swift.translate(f"{SAID} {said}")
    assert not missing
    words = shlex.split(command.replace("\\\n", " "))
    for option, value in (
        ("max-frames", "12"),
        ("max-pixels", "50176"),
        ("fps", "1"),
        ("enable-audio-output", "false"),
    ):
        assert words[words.index(f"--{option}") + 1] == value
    config, _ = sft.parse(shlex.split(said))
    assert (config.max_frames, config.max_pixels, config.fps, config.enable_audio_output) == (12, 50176, 1.0, False)
    for given, told in (
        ('{"min_pixels": 9}', "MIN_PIXELS=9: it is not read here"),
        ('{"hidden": 9}', "--model-kwargs HIDDEN=9: an ms-swift option without an equivalent here"),
        ("[1]", r"--model-kwargs \[1\] is not a JSON object"),
    ):
        with pytest.raises(ConfigError, match=told):
            sft.parse(["--model-kwargs", given])


TAKEN = ("fps", "max-frames", "max-image-tokens")


def test_how_much_of_a_file_is_taken_is_written_out() -> None:
    """Of models for which it is known; what the command says of it stays."""
    for model, ours in (
        ("Qwen/Qwen2.5-VL-7B-Instruct", {"fps": "2", "max-frames": "768"}),
        ("Qwen/Qwen3-Omni-30B-A3B-Instruct", {"fps": "2", "max-frames": "768"}),
        ("Qwen/Qwen3-VL-Embedding-2B", {"max-image-tokens": "1800", "fps": "1", "max-frames": "64"}),
        ("OpenGVLab/InternVL3-8B", {}),
        ("Qwen/Qwen3-8B", {}),
    ):
        command, notes, _ = swift.translate(f"swift sft --model {model} --dataset d.jsonl")
        words = shlex.split(command.replace("\\\n", " "))
        found = {option: words[words.index(f"--{option}") + 1] for option in TAKEN if f"--{option}" in words}
        assert found == ours
        assert any("--max-seconds" in note for note in notes) == ("Qwen3-8B" not in model)
    for before, theirs, frames in (
        ("", "infer --model Qwen/Qwen3-VL-8B-Instruct", "--fps 2 --max-frames 768"),
        ("FPS_MAX_FRAMES=12", "infer --model Qwen/Qwen3-VL-8B-Instruct", "--max-frames 12 --fps 2"),
        ("", "infer --adapters run --model Qwen/Qwen3-VL-8B-Instruct", None),
        ("", "export --model Qwen/Qwen2-VL-2B --quant_method fp8", None),
    ):
        command, _, missing = swift.translate(f"{before} swift {theirs}")
        assert not missing
        assert "--fps" not in command if frames is None else frames in command
    command, *_ = swift.translate("FPS_MAX_FRAMES=12 swift sft --model Qwen/Qwen3-VL-8B-Instruct --dataset d.jsonl")
    assert ("--fps 2 " in command, "--max-frames 12 " in command) == (True, True)


def test_a_variable_that_a_command_has_no_use_for_is_told() -> None:
    for theirs, told in (
        ("NPROC_PER_NODE=4 swift infer --model m --infer_backend vllm --vllm_tensor_parallel_size 2", "--nproc 4"),
        ("ENABLE_AUDIO_OUTPUT=0 swift infer --adapters run", "--enable-audio-output 0"),
        ("MAX_PIXELS=9 swift export --model m", "--max-pixels 9"),
    ):
        _, notes, missing = swift.translate(theirs)
        assert not missing
        assert any(note.startswith(f"{told}, a variable in ms-swift, is left out: ") for note in notes)
    assert not any("a variable" in note for note in swift.translate("NPROC_PER_NODE=1 swift export --model m")[1])


def test_names_of_anybody_are_told_where_our_command_is_run(monkeypatch, capsys) -> None:
    """Others of Swift's variables are options there, or refused."""
    monkeypatch.setenv("FPS", "1")
    monkeypatch.setenv("MAX_NUM", "6")
    config, _ = sft.parse([])
    assert config.fps is None
    told = "the variable FPS=1 (give --fps instead); the variable MAX_NUM=6 (unread)"
    assert capsys.readouterr().err == f"without effect here: {told}\n"
    infer.parser()
    monkeypatch.setenv("STACK_FRAMES", "3")
    with pytest.raises(ConfigError, match=r"^The variable STACK_FRAMES=3: here it is always '1'"):
        sft.parse([])
