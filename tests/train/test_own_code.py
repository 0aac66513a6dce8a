"""A model whose code lies in its folder, in the shape of MiniCPM-V 2.6: refused unless it is allowed, then trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
LORA = ["--tuner", "lora", "--target-modules", ".*vpm.*(q_proj|v_proj)|.*llm.*q_proj", "--modules-to-save", "resampler"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with `auto_map` and the files that it names, and a chat template that knows no pictures."""
    import torch
    from transformers import PreTrainedTokenizerFast

    from shardproof.models.chatml import CHATML, TURN_END
    from shardproof.models.tiny import PAD, train_tokenizer
    from train.minicpm_v.configuration_minicpmv import MiniCPMVConfig
    from train.minicpm_v.modeling_minicpmv import MiniCPMV
    from train.minicpm_v.processing_minicpmv import MiniCPMVImageProcessor, MiniCPMVProcessor

    folder = tmp_path_factory.mktemp("own_code") / "minicpm"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(["which digit is this?"]).backend_tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        extra_special_tokens=["<image>", "</image>", "<unk>"],
        chat_template=CHATML,
    )
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MiniCPMVConfig(
        **sizes,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        vision_config={**sizes, "image_size": 28, "patch_size": 14, "vision_use_head": False},
    )
    MiniCPMVConfig.register_for_auto_class()
    MiniCPMV.register_for_auto_class("AutoModelForCausalLM")
    MiniCPMVImageProcessor.register_for_auto_class("AutoImageProcessor")
    MiniCPMVProcessor.register_for_auto_class()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        MiniCPMV(config).save_pretrained(folder)
    MiniCPMVProcessor(MiniCPMVImageProcessor(), tokenizer).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "minicpmv"
    return folder


@pytest.fixture(scope="module")
def argv(model: Path, files: Path) -> list[str]:
    rows = [
        {"query": "<image>which digit?", "response": "two and seven", "images": ["a.png"]},
        {"query": "what is said?", "response": "nothing at all"},
        {"query": "<image> or <image>?", "response": "both", "images": ["b.png", "a.png"]},
        {"prompt": "seen <image>:", "completion": " noise", "images": ["b.png"]},
    ]
    file = files / "own_code.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows * 3))
    fixed = "--max-steps 3 --global-batch-size 4 --per-device-batch-size 2 --lr-scheduler constant --workers 0"
    return ["sft", "--dataset", str(file), "--learning-rate", "3e-3", "--output-dir", "OUT", *fixed.split()]


@pytest.fixture(scope="module")
def runs(commands, argv: list[str], model: Path, files: Path, tmp_path_factory: pytest.TempPathFactory):
    asked = ["infer", "RUNS/two", "--prompt", "which digit?", "--image", str(files / "a.png"), "--max-new-tokens", "4"]
    allowed = [*argv, "--trust-remote-code", "--nproc", "2", "--stage", "3", "--model"]
    with pytest.MonkeyPatch.context() as patch:  # where transformers puts such code to run it
        patch.setenv("HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        return commands(
            [
                ("refused", [*argv, "--model", str(model)]),
                ("one", [*allowed, str(model), "--nproc", "1", "--stage", "0"]),
                ("two", [*allowed, str(model)]),
                ("asked", [*asked, "--trust-remote-code"]),
                ("asked_by_two", [*asked, "--trust-remote-code", "--nproc", "2"]),
                ("asked_without", asked),
                ("lora", [*allowed, str(model), "--nproc", "1", "--stage", "0", *LORA]),
                ("lora_two", [*allowed, str(model), *LORA]),
                ("lora_on", [*allowed[:-1], "--tuner", "lora", "--adapters", "RUNS/lora_two"]),
                ("lora_asked", [*asked[:1], "RUNS/lora_two", *asked[2:], "--trust-remote-code"]),
                ("lora_out", ["export", "RUNS/lora_two", "OUT", "--trust-remote-code"]),
                ("lora_out_asked", [*asked[:1], "RUNS/lora_out", *asked[2:], "--trust-remote-code"]),
            ]
        )


def test_its_code_runs_only_where_that_is_allowed(runs, model: Path) -> None:
    assert runs["refused"].code == 2
    said = runs["refused"].output
    assert f"The model {model} (minicpmv) is not a class of transformers: it comes with its own code" in said
    assert "modeling_minicpmv.py" in said
    assert "--trust-remote-code" in said


def test_two_ranks_have_the_losses_of_one_process(runs) -> None:
    one, two = runs["one"], runs["two"]
    assert (one.code, two.code) == (0, 0), one.output + two.output
    assert one.series("loss")[-1] < one.series("loss")[0]
    assert two.series("loss") == pytest.approx(one.series("loss"), abs=2e-5)
    assert two.series("grad_norm") == pytest.approx(one.series("grad_norm"), rel=1e-4)


def test_so_they_have_with_adapters_which_are_asked_exported_and_trained_on(runs) -> None:
    """PEFT's model for what writes asks for more than code of that kind has."""
    one, two, on = runs["lora"], runs["lora_two"], runs["lora_on"]
    assert (one.code, two.code, on.code) == (0, 0, 0), one.output + two.output + on.output
    assert one.series("loss")[-1] < one.series("loss")[0]
    assert two.series("loss") == pytest.approx(one.series("loss"), abs=2e-5)
    assert on.series("loss")[0] < two.series("loss")[0]
    answers = [runs[name] for name in ("lora_asked", "lora_out", "lora_out_asked")]
    assert [run.code for run in answers] == [0, 0, 0], [run.output for run in answers]
    assert answers[0].output.strip().splitlines()[-1:] == answers[2].output.strip().splitlines()[-1:]


def test_it_is_asked(runs, files: Path) -> None:
    """Its answer is the one that its forward gives, token by token."""
    import torch

    from shardproof.data.media.encode import MediaEncoder
    from shardproof.data.media.limits import Limits
    from shardproof.models.loading.classes import load_pretrained
    from shardproof.models.loading.processors import load_processor

    folder = str(runs["two"].folder / "model")
    model = load_pretrained(folder, trust_remote_code=True).eval()
    processor = load_processor(folder, trust_remote_code=True)
    parts = [{"type": "image", "image": str(files / "a.png")}, {"type": "text", "text": "which digit?"}]
    data = MediaEncoder(processor, Limits(root=Path("/"))).question([{"role": "user", "content": parts}], "")
    answer: list[int] = []
    with torch.no_grad():
        while len(answer) < 4 and answer[-1:] != [processor.tokenizer.eos_token_id]:
            answer.append(int(model(**data).logits[0, -1].argmax()))
            data["input_ids"] = torch.cat([data["input_ids"], torch.tensor([[answer[-1]]])], dim=1)
            length = data["input_ids"].shape[1]
            data |= {"attention_mask": torch.ones(1, length), "position_ids": torch.arange(length)[None]}
    said = processor.tokenizer.decode(answer, skip_special_tokens=True).strip()
    for name in ("asked", "asked_by_two"):
        assert runs[name].code == 0, runs[name].output
        assert runs[name].output.strip().splitlines()[-1:] == said.splitlines()[-1:], name
    assert runs["asked_without"].code == 2
    assert "--trust-remote-code" in runs["asked_without"].output


def test_its_files_are_planned(model: Path, monkeypatch, tmp_path) -> None:
    """Its batches have lists, with an element for each row."""
    from shardproof.doctor.config import PlanConfig
    from shardproof.doctor.planning.plan import make_plan

    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path))
    options = {"model": str(model), "trust_remote_code": True, "files": ["image=90x30"] * 2, "max_length": [64]}
    plan = make_plan(PlanConfig(**options, gpus=[2], stage="3", per_device_batch_size=[2]))
    assert plan.candidates[0].activations > 0
    text = make_plan(PlanConfig(**options | {"files": []}, gpus=[2], stage="3", per_device_batch_size=[2]))
    assert 0 < text.candidates[0].activations < plan.candidates[0].activations


def test_doctor_plans_its_longest_row_with_files(model: Path, files: Path, monkeypatch, tmp_path) -> None:
    """Its marks of files are no tokens."""
    from shardproof.data.media.encode import MediaEncoder
    from shardproof.data.media.limits import Limits
    from shardproof.data.media.rows import encode_media_rows
    from shardproof.data.rows import read_rows
    from shardproof.doctor.planning.sample import heaviest
    from shardproof.models.loading.processors import load_processor

    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path))
    encoder = MediaEncoder(load_processor(str(model), trust_remote_code=True), Limits(root=files))
    row = {"query": "<image>which digit?", "response": "a", "images": ["a.png"]}
    rows = [{"query": "which " * 50, "response": "a"}, row, row | {"response": "a digit"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = heaviest(encode_media_rows(read_rows([str(tmp_path / "rows.jsonl")]), encoder, max_length=None), encoder)
    assert found.what == f"the files of {tmp_path / 'rows.jsonl'}:3"


def test_doctor_loads_it(model: Path, monkeypatch, tmp_path) -> None:
    """It asks what transformers says of the weights, which comes beside the model."""
    from shardproof.models.loading.classes import load_pretrained

    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path))
    found, info = load_pretrained(str(model), trust_remote_code=True, output_loading_info=True)
    assert not info["missing_keys"]
    with pytest.raises(KeyError, match="position_ids"):
        found(input_ids=None)  # by name


def test_what_is_saved_brings_the_code_along(runs, model: Path) -> None:
    from safetensors.torch import load_file

    folder = runs["two"].folder / "model"
    assert {file.name for file in model.glob("*.py")} <= {file.name for file in folder.glob("*.py")}
    before, after = load_file(model / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert {name.split(".")[0] for name in before if not before[name].equal(after[name])} == {"llm", "vpm", "resampler"}


@pytest.mark.slow
def test_a_run_begins_with_what_another_has_saved(runs, commands, argv: list[str]) -> None:
    from safetensors.torch import load_file

    start = runs["two"].folder / "model"
    more = ["--model", str(start), "--trust-remote-code", "--freeze", "vision,aligner", "--max-steps", "1"]
    (again,) = commands([("again", [*argv, *more])]).values()
    assert again.code == 0, again.output
    before, after = (load_file(folder / "model.safetensors") for folder in (start, again.folder / "model"))
    assert {name.split(".")[0] for name in after if not before[name].equal(after[name])} == {"llm"}
